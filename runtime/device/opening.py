"""Opens the device that an artefact was built for, and says which one where there is a choice.

The only place that knows which kinds of devices there are; their modules are imported when they are needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.base import Device
from dflashc.runtime.device.cpu import CpuDevice, check_processor
from dflashc.runtime.device.driver import Driver, GpuInfo
from dflashc.runtime.device.fitting import check_kernels
from dflashc.runtime.device.gpu import GpuDevice
from dflashc.runtime.device.kernels import KernelTable, load_kernels
from dflashc.runtime.errors import RequestError, TargetError
from dflashc.runtime.manifest import Requirements
from dflashc.runtime.processors import choose_threads

GPU_MODULES = {
    "vulkan": "dflashc.runtime.device.vulkan",
    "cuda": "dflashc.runtime.device.cuda",
    "rocm": "dflashc.runtime.device.hip",
}
"""By the machine that an artefact requires."""

_RANKS = ("discrete", "integrated", "other", "software")


class GpuModule(Protocol):
    """What the module of a kind of GPUs offers."""

    def find_gpus(self) -> list[GpuInfo]:
        """All that its driver shows, in the driver's order. Raises `TargetError` where there is no driver."""

    def refusal(self, info: GpuInfo, need: Requirements, allow_ptx: bool) -> str:
        """Why code of `need.level` is not for a GPU, "" where it is."""

    def open_driver(self, index: int, artefact: Artefact, table: KernelTable, allow_ptx: bool) -> tuple[Driver,
                                                                                                       list[str]]:
        """Open the GPU with this index and load the kernels; and what the user should know."""


def open_device(artefact: Artefact, *, threads: int | None = None, gpu: str | None = None,
                allow_ptx: bool = False) -> Device[Any]:
    """The device for an artefact, with its kernels loaded.

    Parameters
    ----------
    threads : int, optional
        Threads that compute on a CPU; the number of available cores when left out.
    gpu : str, optional
        Number or part of the name of the GPU to use; a discrete one before an integrated one when left out.
    allow_ptx : bool
        Compile the artefact's PTX where its CUDA code is not for the GPU.

    Raises
    ------
    ArtefactError
        The artefact is damaged, or made for another machine.
    TargetError
        No driver, no such GPU, or none with what the artefact needs.
    RequestError
        A choice that the artefact does not offer.
    """
    machine = artefact.manifest.requirements.machine
    if machine not in GPU_MODULES:
        if gpu is not None or allow_ptx:
            raise RequestError(f"{artefact.directory} runs on the CPU: --device and --allow-ptx are for GPUs")
        check_processor(artefact.manifest.requirements)
        return CpuDevice(artefact.kernels, choose_threads(threads))
    if threads is not None:
        raise RequestError(f"{artefact.directory} runs on a GPU ({machine}): --threads is for CPUs")
    if allow_ptx and machine != "cuda":
        raise RequestError(f"{artefact.directory} has no PTX: --allow-ptx is for CUDA")
    return _open_gpu(artefact, gpu, allow_ptx)


def gpu_module(machine: str) -> GpuModule:
    """The module of a kind of GPUs, a key of `GPU_MODULES`."""
    module: Any = importlib.import_module(GPU_MODULES[machine])
    kind: GpuModule = module
    return kind


def _open_gpu(artefact: Artefact, gpu: str | None, allow_ptx: bool) -> GpuDevice:
    need = artefact.manifest.requirements
    kind = gpu_module(need.machine)
    table = load_kernels(artefact)
    infos = kind.find_gpus()
    index = choose_gpu(infos, gpu, lambda info: refusal(kind, info, need, allow_ptx))
    info = infos[index]
    check_kernels(artefact.plan, table, info)
    driver, notes = kind.open_driver(index, artefact, table, allow_ptx)
    if info.kind == "software":
        notes = [f"running on {info.name}, which is no GPU but computes on the CPU", *notes]
    return GpuDevice(driver, table, artefact, notes)


def refusal(kind: GpuModule, info: GpuInfo, need: Requirements, allow_ptx: bool = False) -> str:
    """Why a GPU cannot run what has these requirements, in one line; "" where it can."""
    missing = [name for name in need.features if name not in info.features]
    lacks = f"lacks {', '.join(missing)}: update its driver, or build for another target" if missing else ""
    return info.unfit or kind.refusal(info, need, allow_ptx) or lacks


def choose_gpu(infos: Sequence[GpuInfo], wanted: str | None, refusal: Callable[[GpuInfo], str]) -> int:
    """The index of the GPU to use.

    Parameters
    ----------
    wanted : str or None
        A number or a part of a name, as the user gave it.
    refusal : callable
        Why a GPU cannot be used, "" where it can.

    Raises
    ------
    RequestError
        No or several GPUs have that name.
    TargetError
        The GPU that is wanted, or every one there is, cannot be used.
    """
    listed = "; ".join(f"{i} {info.name}" for i, info in enumerate(infos)) or "none"
    if wanted is None:
        candidates = sorted(range(len(infos)), key=lambda i: _RANKS.index(infos[i].kind))
    elif wanted.isascii() and wanted.isdigit():
        candidates = [int(wanted)] if int(wanted) < len(infos) else []
    else:
        candidates = [i for i, info in enumerate(infos) if wanted.casefold() in info.name.casefold()]
    if wanted is not None and len(candidates) != 1:
        raise RequestError(f"--device {wanted} names {len(candidates) or 'no'} GPUs, expected one of: {listed}")
    reasons = {i: refusal(infos[i]) for i in candidates}
    for i in candidates:
        if not reasons[i]:
            return i
    if not candidates:
        raise TargetError("the driver shows no GPU; see `dflashc targets`")
    raise TargetError("; ".join(f"{infos[i].name}: {reasons[i]}" for i in candidates))

