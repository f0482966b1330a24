"""The CUDA targets: one cubin for an architecture such as sm_89, and the same as PTX for later ones.

Kernels become CUDA C++ in parallel processes; NVRTC then takes all of them as one translation unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dflashc.runtime.artefact import GPU_PTX
from dflashc.runtime.device.kernels import Kernel
from dflashc.runtime.errors import TargetError
from dflashc.runtime.manifest import Requirements
from dflashc.targets.cuda import nvrtc
from dflashc.targets.cuda.architectures import ARCHITECTURES
from dflashc.targets.cuda.source import PRELUDE, kernel_source
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
        results = run_parallel(write_source, jobs, workers, lambda written: progress(len(written[0])))
        code = nvrtc.compile_source(PRELUDE + "".join(source for _, source in results), self.traits.arch)
        write_module(folder, "cubin", (k for kernels, _ in results for k in kernels), code.cubin)
        (folder / GPU_PTX).write_bytes(code.ptx)
        return self.requirements()


def write_source(traits: Traits, requests: Sequence[KernelRequest]) -> tuple[list[Kernel], str]:
    """Kernels described, and as CUDA C++. Runs in a worker process."""
    kernels = [build_kernel(traits, request) for request in requests]
    return [describe(k) for k in kernels], kernel_source(traits.arch, kernels)


def names() -> list[str]:
    return [PREFIX + arch.replace("_", "") for arch in ARCHITECTURES]


def make_target(name: str) -> CudaTarget:
    """"cuda-sm89" for sm_89, and so on. Raises `TargetError` for an architecture that is not known."""
    for arch in ARCHITECTURES:
        if name == PREFIX + arch.replace("_", ""):
            return CudaTarget(name, Traits("cuda", arch))
    raise TargetError(f"unknown target {name!r}; known: {', '.join(names())}")
