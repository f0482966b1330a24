"""What a GPU's driver does for `gpu.GpuDevice`: memory, copies and recorded launches, in the order in which it is told.

Implemented by `vulkan`, and by `streams` for CUDA and HIP. Knows nothing of plans and sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from dflashc.runtime.device.kernels import Kernel

ALIGNMENT = 64  # bytes: of every offset into a buffer that a kernel is given

HANG_SECONDS = 120.0
"""A GPU that has not finished by then is taken to hang."""


class Place(Enum):
    """Where memory is: DEVICE, where kernels are fast; SHARED, where the host reads results after a run; STAGING, for
    what is on its way between the host and the device.
    """

    DEVICE = "device"
    SHARED = "shared"
    STAGING = "staging"


@dataclass(frozen=True)
class Limits:
    """What a device takes.

    Attributes
    ----------
    groups : int
        Workgroups of a launch.
    threads : tuple of int
        Of a workgroup, along x, y and z.
    threads_in_all : int
        Of a workgroup.
    shared : int
        Bytes of shared memory of a workgroup.
    buffers : int
        Of a kernel.
    binding : int
        Bytes of a buffer that a kernel sees.
    allocation : int
        Bytes of one allocation.
    """

    groups: int
    threads: tuple[int, int, int]
    threads_in_all: int
    shared: int
    buffers: int
    binding: int
    allocation: int


@dataclass(frozen=True)
class GpuInfo:
    """A GPU as its driver describes it.

    Attributes
    ----------
    kind : str
        "discrete", "integrated", "software", or "other".
    driver : str
        The driver's name and version.
    level : str
        What code must be made for: "sm_89", "gfx1151"; "" where it is portable.
    memory : int
        Bytes in all.
    features : frozenset of str
        Names that an artefact may require.
    unfit : str
        Why this program cannot use it at all; "" where it can.
    """

    name: str
    kind: str
    driver: str
    level: str
    memory: int
    limits: Limits
    features: frozenset[str] = field(default_factory=frozenset)
    unfit: str = ""


class Block(Protocol):
    """Memory of a driver. `mapped` is where the host sees it, uint8 (nbytes,); None where it does not."""

    nbytes: int
    mapped: np.ndarray | None


class Binding(NamedTuple):
    """A part of a block that a kernel is given; sizes in bytes."""

    block: Any
    offset: int
    nbytes: int


class Call(NamedTuple):
    """A launch with everything bound: `scalars` are 4-byte words; later calls wait for this one where `barrier` is set.
    """

    kernel: Kernel
    buffers: tuple[Binding, ...]
    scalars: bytes
    groups: int
    barrier: bool


class Driver(Protocol):
    """An open GPU. Every method raises `TargetError` when the driver refuses; handles are the driver's own."""

    info: GpuInfo

    def available_memory(self) -> int:
        """Bytes that can still be allocated."""

    def allocate(self, nbytes: int, place: Place) -> Block:
        """Memory with arbitrary contents."""

    def release(self, block: Any) -> None:
        """Give memory back that no unfinished work uses."""

    def clear(self, block: Any) -> None:
        """Fill with zeros, after all that came before."""

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, nbytes: int) -> None:
        """Copy from block to block, after all that came before; does not wait."""

    def record(self, calls: Sequence[Call]) -> Any:
        """Launches to be submitted as often as wanted."""

    def discard(self, recording: Any) -> None:
        """Give a recording back that is not running."""

    def submit(self, recording: Any) -> None:
        """Run a recording, after all that came before; does not wait."""

    def wait(self) -> None:
        """Return when everything is done; the host then sees shared and staging memory as it is."""

    def time(self, recording: Any) -> np.ndarray:
        """Run the calls of a recording one by one, and wait; seconds of each, float64 (calls,)."""

    def close(self) -> None:
        """Give everything back, whatever state the device is in."""
