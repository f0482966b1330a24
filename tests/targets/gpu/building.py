"""What a test needs to compile for a GPU."""

import pytest

from dflashc.targets.registry import find_target


def require_toolchain(target: str) -> None:
    """Skip the test, with the reason, where this machine cannot build for a target."""
    if missing := find_target(target).missing():
        pytest.skip(f"building for {target} needs {'; '.join(missing)}")
