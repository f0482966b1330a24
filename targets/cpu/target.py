"""The CPU target: a feature level of x86-64 and everything the build asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflashc.runtime.artefact import KERNELS
from dflashc.runtime.device.cpu import ABI
from dflashc.runtime.errors import BuildError, TargetError
from dflashc.runtime.kv_types import KV_TYPES
from dflashc.runtime.manifest import Requirements
from dflashc.targets import packing
from dflashc.targets.context import PackedWeight, Rule
from dflashc.targets.cpu.compile import compile_library, find_linker
from dflashc.targets.cpu.rules import make_rules
from dflashc.targets.cpu.traits import LEVELS, Traits, best_level, host_features


@dataclass(frozen=True)
class CpuTarget:
    """See `targets.base.Target`."""

    name: str
    traits: Traits

    @property
    def row_group(self) -> int:
        return self.traits.lanes

    @property
    def kv_types(self) -> tuple[str, ...]:
        return tuple(KV_TYPES)

    def missing(self) -> list[str]:
        try:
            find_linker()
        except TargetError as error:
            return [str(error)]
        return []

    def requirements(self) -> Requirements:
        return Requirements("x86_64", self.traits.name, self.traits.features, ABI)

    def describe_weight(self, name: str, type_name: str, shape: tuple[int, ...]) -> tuple[PackedWeight, str]:
        choice = packing.packed_format(type_name)
        rows, columns = shape
        if columns % choice.format.group:
            raise BuildError(f"tensor {name} ({type_name}) has {columns} columns; the CPU target needs a multiple of "
                             f"{choice.format.group}")
        size = choice.format.packed_bytes(rows, columns, self.traits.lanes)
        return PackedWeight(name, choice.format.name, choice.format.form, rows, columns, size), choice.substitution

    def pack_rows(self, type_name: str, data: np.ndarray, columns: int) -> np.ndarray:
        return packing.pack_rows(type_name, data, columns, self.traits.lanes)

    def rules(self) -> Mapping[str, Rule]:
        return make_rules(self.traits)

    def compile(self, requests: Sequence[Any], folder: Path, progress: Callable[[int], None]) -> Requirements:
        compile_library(self.traits, requests, folder / KERNELS, progress)
        return self.requirements()


def make_target(name: str) -> CpuTarget:
    """"cpu" for this machine's best level, "cpu-<level>" for a named one. Raises `TargetError`."""
    if name == "cpu":
        return CpuTarget(name, best_level(host_features()))
    level = name.removeprefix("cpu-")
    if level not in LEVELS:
        raise TargetError(f"unknown target {name!r}; known: {', '.join(names())}")
    return CpuTarget(name, LEVELS[level])


def names() -> list[str]:
    return ["cpu", *(f"cpu-{level}" for level in LEVELS)]
