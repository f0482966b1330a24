"""The interface of a device: memory, recorded launches, replay. All that a session knows of the hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np

from dflashc.runtime.artefact import Artefact
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

    def seconds(self) -> np.ndarray:
        """Run once and return the time of each launch, float64 (launches,).

        On a GPU the launches run one by one here, so their sum is more than `run` takes.
        """

    def ticks(self) -> np.ndarray:
        """Time that each launch took, over all runs so far, in a unit of the device: int64 (launches,).

        0 throughout on a device that does not count while it runs.
        """


class Device(Protocol[AnyMemory]):
    """A device that an artefact runs on.

    `upload` and `download` count the bytes that cross between host and device; `synchronisations` counts waits.

    Attributes
    ----------
    identity : str
        What its speed depends on: the product, its driver, the threads in use. Timings of one identity say nothing
        about another.
    notes : list of str
        What the user should know of how it was opened.
    """

    name: str
    identity: str
    notes: list[str]
    uploaded: int
    downloaded: int
    synchronisations: int

    def check_memory(self, artefact: Artefact, context: int) -> None:
        """Raise `TargetError` unless a session of `context` tokens fits the device; before anything is allocated."""

    def alloc(self, nbytes: int, shared: bool = False) -> AnyMemory:
        """Zeroed memory; `shared` for small results, which `download` then reads without a further wait."""

    def weights(self, artefact: Artefact) -> Mapping[str, AnyMemory]:
        """The artefact's weights by name. A device that has to copy them does so once; all sessions share them."""

    def upload(self, memory: AnyMemory, data: np.ndarray, offset: int = 0) -> None:
        """Write `data` at `offset` bytes before anything that is run later; does not wait for the device."""

    def download(self, memory: AnyMemory, dtype: str, count: int, offset: int = 0) -> np.ndarray: ...

    def record(self, launches: Sequence[Launch], memories: Mapping[str, AnyMemory], context: int) -> Replay: ...

    def close(self) -> None: ...
