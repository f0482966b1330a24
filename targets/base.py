"""What the build asks of a target. One folder per target implements it; `registry` finds them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflashc.runtime.errors import TargetError
from dflashc.runtime.manifest import Requirements
from dflashc.targets.context import PackedWeight, Rule


class Target(Protocol):
    """A device family that artefacts are built for.

    Attributes
    ----------
    name : str
        As the user spells it.
    row_group : int
        Output rows that the weight layout keeps together.
    kv_types : tuple of str
        The types in which it stores K and V, of `runtime.kv_types`.
    """

    @property
    def name(self) -> str: ...

    @property
    def row_group(self) -> int: ...

    @property
    def kv_types(self) -> tuple[str, ...]: ...

    def missing(self) -> list[str]:
        """What a build needs and this machine lacks, and how to get it; one line each."""

    def requirements(self) -> Requirements:
        """What a machine needs to run any artefact of this target."""

    def describe_weight(self, name: str, type_name: str, shape: tuple[int, ...]) -> tuple[PackedWeight, str]:
        """How a weight is stored, and a note where that is wider than in the file ("" otherwise)."""

    def pack_rows(self, type_name: str, data: np.ndarray, columns: int) -> np.ndarray:
        """Consecutive rows of a weight in this target's layout."""

    def rules(self) -> Mapping[str, Rule]:
        """Lowering rules by operator."""

    def compile(self, requests: Sequence[Any], folder: Path, progress: Callable[[int], None]) -> Requirements:
        """Compile every kernel of `requests` into files of `folder`; `progress` hears how many are done.

        Returns what a machine needs to run these kernels.
        """


def check_toolchain(target: Target) -> None:
    """Raise `TargetError` when something that a build needs is missing; before any weight is read."""
    if missing := target.missing():
        raise TargetError(f"target {target.name} cannot be built here: {'; '.join(missing)}")
