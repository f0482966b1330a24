"""Targets by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflashc.runtime.errors import TargetError

if TYPE_CHECKING:
    from dflashc.targets.base import Target


def find_target(name: str) -> Target:
    """The target that the user named; raises `TargetError` listing the known ones."""
    from dflashc.targets.cpu import target as cpu

    if name == "cpu" or name.startswith("cpu-"):
        return cpu.make_target(name)
    raise TargetError(f"unknown target {name!r}; known: {', '.join(cpu.names())}")
