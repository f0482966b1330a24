"""The ROCm targets: one code object for a processor such as gfx1151.

Kernels become LLVM IR in parallel processes; the back end then takes all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dflashc.runtime.device.kernels import Kernel
from dflashc.runtime.errors import TargetError
from dflashc.runtime.manifest import Requirements
from dflashc.targets.gpu.kernel_files import write_module
from dflashc.targets.gpu.target import GpuTarget, build_kernel, describe
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.parallel import processors, run_parallel
from dflashc.targets.requests import KernelRequest, batches, distinct
from dflashc.targets.rocm import toolchain
from dflashc.targets.rocm.architectures import ARCHITECTURES
from dflashc.targets.rocm.code_object import read_code_object
from dflashc.targets.rocm.ir import eased, kernel_ir

PREFIX = "rocm-"


class RocmTarget(GpuTarget):
    """See `targets.base.Target`."""

    def missing(self) -> list[str]:
        return toolchain.missing()

    def requirements(self, features: Sequence[str] = ()) -> Requirements:
        return super().requirements([*features, *filter(None, [ARCHITECTURES[self.traits.arch].runtime])])

    def compile(self, requests: Sequence[KernelRequest], folder: Path,
                progress: Callable[[int], None]) -> Requirements:
        workers = processors()
        jobs = [(self.traits, batch) for batch in batches(distinct(requests), workers)]
        results = run_parallel(write_ir, jobs, workers, lambda written: progress(len(written)))
        kernels, texts = zip(*(k for written in results for k in written), strict=True)
        code = toolchain.compile_modules(self.traits.arch, texts)
        spilled = {k.name for k in read_code_object(code).kernels.values() if k.spills}
        if spilled:
            texts = tuple(eased(t) if k.symbol in spilled else t for k, t in zip(kernels, texts, strict=True))
            code = toolchain.compile_modules(self.traits.arch, texts)
        write_module(folder, "hsaco", kernels, code)
        return self.requirements()


def write_ir(traits: Traits, requests: Sequence[KernelRequest]) -> list[tuple[Kernel, str]]:
    """Kernels described, and as LLVM IR. Runs in a worker process."""
    kernels = [build_kernel(traits, request) for request in requests]
    return [(describe(k), kernel_ir(traits.arch, k)) for k in kernels]


def names() -> list[str]:
    return [PREFIX + arch for arch in ARCHITECTURES]


def make_target(name: str) -> RocmTarget:
    """Raises `TargetError` for a processor that is not known."""
    arch = name.removeprefix(PREFIX)
    if arch not in ARCHITECTURES:
        raise TargetError(f"unknown target {name!r}; known: {', '.join(names())}")
    return RocmTarget(name, Traits("rocm", arch, most_threads=1024, shared_bytes=65536))
