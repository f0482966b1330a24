"""Whether a GPU takes what an artefact asks of it: its kernels, its buffers, its memory. Asked before anything is sent.

Knows limits and sizes; nothing of how either came about.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.driver import ALIGNMENT, GpuInfo
from dflashc.runtime.device.kernels import Kernel, KernelTable
from dflashc.runtime.device.weight_blocks import weight_blocks, weight_parts
from dflashc.runtime.errors import TargetError
from dflashc.runtime.plan import Plan


def check_kernels(plan: Plan, table: KernelTable, info: GpuInfo) -> None:
    """Raise `TargetError` for the first kernel or launch that is beyond the device's limits."""
    for symbol in dict.fromkeys(x.kernel for program in plan.programs.values() for x in program.launches):
        check_kernel(table.kernel(symbol), info)
    for program in plan.programs.values():
        for launch in program.launches:
            if launch.units.multiple > info.limits.groups:
                raise TargetError(f"launch {launch.operation!r} needs {launch.units.multiple:,} workgroups, "
                                  f"{info.name} has {info.limits.groups:,}: use another device")


def check_kernel(kernel: Kernel, info: GpuInfo) -> None:
    """Raise `TargetError` for a kernel that is beyond the device's limits."""
    for what, found, most in _demands(kernel, info):
        if found > most:
            raise TargetError(f"kernel {kernel.symbol} needs {what} of {found:,}, {info.name} has {most:,}: "
                              "use another device, or build for this one")


def _demands(kernel: Kernel, info: GpuInfo) -> Iterator[tuple[str, int, int]]:
    limits = info.limits
    for axis, found, most in zip("xyz", kernel.threads, limits.threads, strict=True):
        yield f"a workgroup's threads along {axis}", found, most
    yield "threads in a workgroup", kernel.threads[0] * kernel.threads[1] * kernel.threads[2], limits.threads_in_all
    yield "shared memory", kernel.shared, limits.shared
    yield "a number of buffers", kernel.buffers, limits.buffers


def check_fits(artefact: Artefact, context: int, info: GpuInfo, available: int, loaded: bool) -> None:
    """Raise `TargetError` unless a session's buffers and the weights fit the device's limits and free memory.

    Parameters
    ----------
    available : int
        Bytes that can still be allocated.
    loaded : bool
        Whether the weights are there already.
    """
    limits, manifest, plan = info.limits, artefact.manifest, artefact.plan
    most = min(limits.binding, limits.allocation)
    for buffer in plan.buffers.values():
        size = _rounded(buffer.size(context))
        if buffer.role != "view" and size > most:
            raise TargetError(f"buffer {buffer.name} has {size:,} bytes at a context of {context:,} tokens, "
                              f"{info.name} takes {most:,}: use a smaller --ctx")
    for part in weight_parts(manifest.weights, plan.adjacent):
        if _rounded(part.nbytes) > limits.binding:
            raise TargetError(f"weight {part.name} has {part.nbytes:,} bytes, kernels of {info.name} see "
                              f"{limits.binding:,}: use another device or a smaller model")
    for block in weight_blocks(manifest.weights, plan.adjacent):
        if _rounded(block.nbytes) > limits.allocation:
            raise TargetError(f"a block of weights has {block.nbytes:,} bytes, {info.name} allocates "
                              f"{limits.allocation:,} at once: use another device or a smaller model")
    memory = plan.memory(context)
    weights = 0 if loaded else sum(w.bytes for w in manifest.weights)
    need = weights + sum(memory.values())
    if need > available:
        caches = memory.get("cache", 0)
        raise TargetError(f"{_size(need)} of memory are needed (weights {_size(weights)}, caches {_size(caches)} at "
                          f"a context of {context:,} tokens), {info.name} has {_size(available)} free: use a smaller "
                          "--ctx")


def _rounded(nbytes: int) -> int:
    """As it is allocated and bound."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
