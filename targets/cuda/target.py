"""The CUDA targets: one cubin for an architecture such as sm_89, and the same as PTX for later ones.

Kernels become CUDA C++ in parallel processes, which also look how many registers they take; NVRTC then compiles all of
them as one translation unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflashc.runtime.artefact import GPU_PTX
from dflashc.runtime.device.kernels import Kernel
from dflashc.runtime.errors import TargetError
from dflashc.runtime.manifest import Requirements
from dflashc.targets.cuda import nvrtc
from dflashc.targets.cuda.architectures import ARCHITECTURES
from dflashc.targets.cuda.cubin import read_cubin
from dflashc.targets.cuda.source import kernel_source, translation_unit
from dflashc.targets.gpu.kernel_files import write_module
from dflashc.targets.gpu.target import GpuTarget, build_kernel, describe
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.parallel import processors, run_parallel
from dflashc.targets.requests import KernelRequest, batches, distinct

PREFIX = "cuda-"


class CudaTarget(GpuTarget):
    """See `targets.base.Target`."""

    def missing(self) -> list[str]:
        return nvrtc.missing()

    def compile(self, requests: Sequence[KernelRequest], folder: Path,
                progress: Callable[[int], None]) -> Requirements:
        workers = processors()
        jobs = [(self.traits, batch) for batch in batches(distinct(requests), workers)]
        parts = run_parallel(write_part, jobs, workers, lambda part: progress(len(part.kernels)))
        spilled = {name for part in parts for name in part.spilled}
        code = nvrtc.compile_source(translation_unit([part.source for part in parts], spilled), self.traits.arch)
        write_module(folder, "cubin", (k for part in parts for k in part.kernels), code.cubin)
        (folder / GPU_PTX).write_bytes(code.ptx)
        return self.requirements()


@dataclass(frozen=True)
class Part:
    """Some kernels described and as CUDA C++, and the names of those that the registers of `translation_unit` do not
    hold."""

    kernels: list[Kernel]
    source: str
    spilled: list[str]


def write_part(traits: Traits, requests: Sequence[KernelRequest]) -> Part:
    """Runs in a worker process."""
    kernels = [build_kernel(traits, request) for request in requests]
    source = kernel_source(traits.arch, kernels)
    records = read_cubin(nvrtc.compile_source(translation_unit([source]), traits.arch).cubin)
    return Part([describe(k) for k in kernels], source, [name for name, r in records.items() if r.stack])


def names() -> list[str]:
    return [PREFIX + arch.replace("_", "") for arch in ARCHITECTURES]


def make_target(name: str) -> CudaTarget:
    """"cuda-sm89" for sm_89, and so on. Raises `TargetError` for an architecture that is not known."""
    for arch in ARCHITECTURES:
        if name == PREFIX + arch.replace("_", ""):
            return CudaTarget(name, Traits("cuda", arch, most_threads=1024, shared_bytes=49152))
    raise TargetError(f"unknown target {name!r}; known: {', '.join(names())}")
