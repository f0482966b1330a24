"""The Vulkan targets: any device of Vulkan 1.2, and Radeon 8060S (gfx1151) with its dot products.

Every kernel is a SPIR-V module of its own, compiled in parallel processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflashc.runtime.device.kernels import Kernel
from dflashc.runtime.errors import TargetError
from dflashc.runtime.manifest import Requirements
from dflashc.targets.gpu.kernel_files import write_modules
from dflashc.targets.gpu.lowering import as_called, lower
from dflashc.targets.gpu.target import GpuTarget, build_kernel, describe
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.parallel import processors, run_parallel
from dflashc.targets.requests import KernelRequest, batches, distinct
from dflashc.targets.vulkan import toolchain
from dflashc.targets.vulkan.glsl import write_shader
from dflashc.targets.vulkan.spirv import required_features

GENERIC = "generic"

TRAITS = {"vulkan": Traits("vulkan", GENERIC),
          "vulkan-gfx1151": Traits("vulkan", "gfx1151", most_threads=1024, shared_bytes=65536)}
"""By target. The generic one does not know whether a device has fast dot products of bytes, and does without."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's SPIR-V and the features it needs."""

    kernel: Kernel
    code: bytes
    features: frozenset[str]


class VulkanTarget(GpuTarget):
    """See `targets.base.Target`."""

    def missing(self) -> list[str]:
        return toolchain.missing()

    def compile(self, requests: Sequence[KernelRequest], folder: Path,
                progress: Callable[[int], None]) -> Requirements:
        workers = processors()
        jobs = [(self.traits, batch) for batch in batches(distinct(requests), workers)]
        results = run_parallel(compile_kernels, jobs, workers, lambda compiled: progress(len(compiled)))
        kernels = [k for compiled in results for k in compiled]
        write_modules(folder, "spirv", ((k.kernel, k.code) for k in kernels))
        return self.requirements(sorted(frozenset().union(*(k.features for k in kernels))))


def compile_kernels(traits: Traits, requests: Sequence[KernelRequest]) -> list[CompiledKernel]:
    """Kernels to SPIR-V. Runs in a worker process."""
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        for request in requests:
            kernel = build_kernel(traits, request)
            code = toolchain.compile_shader(shader_source(traits, kernel), Path(folder), kernel.name)
            kernels.append(CompiledKernel(describe(kernel), code, required_features(code)))
    return kernels


def shader_source(traits: Traits, kernel: Any) -> str:
    """A kernel as GLSL."""
    return write_shader(kernel, lower(kernel, _tvm_target(), as_called), packed_dot=traits.arch != GENERIC)


@cache
def _tvm_target() -> Any:
    """WebGPU's, since a TVM target has to be named; nothing of its code generator is used."""
    import tvm

    return tvm.target.Target("webgpu")


def names() -> list[str]:
    return list(TRAITS)


def make_target(name: str) -> VulkanTarget:
    """Raises `TargetError` for an unknown name."""
    if name not in TRAITS:
        raise TargetError(f"unknown target {name!r}; known: {', '.join(TRAITS)}")
    return VulkanTarget(name, TRAITS[name])
