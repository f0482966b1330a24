"""The interface of a device: memory, recorded launches, replay. All that a session knows of the hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np

from dflashc.runtime.plan import Launch

AnyMemory = TypeVar("AnyMemory", bound="Memory")


class Memory(Protocol):
    """A piece of device memory."""

    nbytes: int

    def view(self, offset: int, nbytes: int | None = None) -> Self:
        """The part that starts at `offset` bytes."""


class Replay(Protocol):
    """Launches recorded once and run many times."""

    def run(self) -> None:
        """Start the launches and wait for them."""


class Device(Protocol[AnyMemory]):
    """A device that an artefact runs on.

    `upload` and `download` count the bytes that cross between host and device; `synchronisations` counts waits.

    Attributes
    ----------
    identity : str
        What its speed depends on: the product, its driver, the threads in use. Timings of one identity say nothing
        about another.
    """

    name: str
    identity: str
    uploaded: int
    downloaded: int
    synchronisations: int

    def alloc(self, nbytes: int) -> AnyMemory: ...

    def map_file(self, path: Path) -> AnyMemory: ...

    def upload(self, memory: AnyMemory, data: np.ndarray, offset: int = 0) -> None: ...

    def download(self, memory: AnyMemory, dtype: str, count: int, offset: int = 0) -> np.ndarray: ...

    def record(self, launches: Sequence[Launch], memories: Mapping[str, AnyMemory], context: int) -> Replay: ...

    def close(self) -> None: ...
