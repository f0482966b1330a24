"""What the build asks of a GPU target, as far as all of them answer alike: weights, rules, limits, what is missing.

Each target adds its code generator. Knows no instruction set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflashc.runtime.device import kernels
from dflashc.runtime.errors import BuildError, TargetError
from dflashc.runtime.manifest import Requirements
from dflashc.targets import packing
from dflashc.targets.context import PackedWeight, Rule
from dflashc.targets.gpu.builder import Kernel
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.requests import KernelRequest

ROW_GROUP = 16
"""Rows that the weight layout keeps together, on every GPU."""


@dataclass(frozen=True)
class GpuTarget(ABC):
    """See `targets.base.Target`."""

    name: str
    traits: Traits

    @property
    def row_group(self) -> int:
        return ROW_GROUP

    @property
    def kv_types(self) -> tuple[str, ...]:
        return ("f16", "q8_0")

    @abstractmethod
    def missing(self) -> list[str]:
        """What a build needs and this machine lacks, and how to get it; one line each."""

    @abstractmethod
    def compile(self, requests: Sequence[KernelRequest], folder: Path,
                progress: Callable[[int], None]) -> Requirements: ...

    def requirements(self, features: Sequence[str] = ()) -> Requirements:
        return Requirements(self.traits.code, self.traits.arch, tuple(features), kernels.GPU_ABI)

    def describe_weight(self, name: str, type_name: str, shape: tuple[int, ...]) -> tuple[PackedWeight, str]:
        choice = packing.packed_format(type_name)
        rows, columns = shape
        if columns % choice.format.group:
            raise BuildError(f"tensor {name} ({type_name}) has {columns} columns; the GPU targets need a multiple of "
                             f"{choice.format.group}")
        size = choice.format.packed_bytes(rows, columns, ROW_GROUP)
        form = "f32" if choice.format.form == "f32" else "q8_32s"
        return PackedWeight(name, choice.format.name, form, rows, columns, size), choice.substitution

    def pack_rows(self, type_name: str, data: np.ndarray, columns: int) -> np.ndarray:
        return packing.pack_rows(type_name, data, columns, ROW_GROUP)

    def rules(self) -> Mapping[str, Rule]:
        from dflashc.targets.gpu.rules import make_rules

        return make_rules(self.traits)


def build_kernel(traits: Traits, request: KernelRequest) -> Kernel:
    """The kernel of a request, within the limits of the target. Raises `TargetError` naming the limit it exceeds."""
    kernel: Kernel = request.build(traits)
    scalar_bytes = 4 * sum(a.is_scalar for a in kernel.arguments)
    for what, found, most in (("threads", kernel.threads, traits.most_threads),
                              ("bytes of workgroup memory", kernel.shared_bytes, traits.shared_bytes),
                              ("bytes of scalars", scalar_bytes, kernels.SCALAR_BYTES)):
        if found > most:
            raise TargetError(f"kernel {kernel.name} takes {found} {what}; {traits.code} {traits.arch} has {most}")
    return kernel


def describe(kernel: Kernel) -> kernels.Kernel:
    """The kernel as launches see it, before its code has a place."""
    operands = tuple(a.kind if a.is_scalar else "buffer" for a in kernel.arguments)
    return kernels.Kernel(kernel.name, (kernel.threads, 1, 1), kernel.shared_bytes, operands, 0, 0)
