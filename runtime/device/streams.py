"""A driver over APIs of streams and graphs, which CUDA and HIP are: all work goes through one stream, in order.

A recording is a graph, captured from the stream. Knows no API's names.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from dflashc.runtime.device.driver import HANG_SECONDS, Call, GpuInfo, Place
from dflashc.runtime.device.kernels import Kernel
from dflashc.runtime.errors import TargetError

_SPIN_SECONDS = 2e-3
_SLEEP_SECONDS = 5e-5


class StreamApi(Protocol):
    """The calls of an API, for one device. Handles and addresses are numbers; what fails raises `TargetError`."""

    info: GpuInfo

    def activate(self) -> None:
        """Let this thread use the device."""

    def free_memory(self) -> int: ...

    def allocate(self, nbytes: int) -> int:
        """Device memory; its address."""

    def free(self, address: int) -> None: ...

    def allocate_host(self, nbytes: int) -> tuple[int, int]:
        """Memory of the host that the device reaches; its address for either."""

    def free_host(self, address: int) -> None: ...

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        """Queue filling device memory with zeros."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between any addresses of the device."""

    def create_stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def is_done(self, stream: int) -> bool:
        """Whether all work of the stream is done."""

    def load(self, code: bytes) -> int:
        """A module."""

    def unload(self, module: int) -> None: ...

    def function(self, module: int, symbol: str) -> int: ...

    def launch(self, function: int, groups: int, threads: tuple[int, int, int], parameters: int, stream: int) -> None:
        """Queue a launch; `parameters` is the address of an array of addresses of values."""

    def begin_capture(self, stream: int) -> None: ...

    def end_capture(self, stream: int) -> int:
        """The graph of what was queued since; it did not run."""

    def instantiate(self, graph: int) -> int:
        """What can be launched of a graph."""

    def destroy_graph(self, graph: int) -> None: ...

    def launch_graph(self, executable: int, stream: int) -> None: ...

    def destroy_executable(self, executable: int) -> None: ...

    def create_event(self) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, event: int, stream: int) -> None: ...

    def seconds_between(self, first: int, last: int) -> float: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class StreamBlock:
    """Memory of the device, or of the host where it is mapped; `address` is where kernels find it."""

    address: int
    nbytes: int
    host: int = 0
    mapped: np.ndarray | None = None


@dataclass(eq=False)
class Graph:
    """A recording: what is launched, and its calls for timing."""

    executable: int
    calls: tuple[Call, ...]


class StreamDriver:
    """See `driver.Driver`.

    Parameters
    ----------
    api : StreamApi
        Of the device; closed with the driver, and when opening fails.
    code : bytes
        The module with all kernels.
    """

    def __init__(self, api: StreamApi, code: bytes, hang_seconds: float = HANG_SECONDS) -> None:
        self.info = api.info
        self._api = api
        self._hang_seconds = hang_seconds
        self._hangs = False
        self._module = self._stream = 0
        self._functions: dict[str, int] = {}
        self._blocks: set[StreamBlock] = set()
        self._graphs: set[Graph] = set()
        self._events: list[int] = []
        try:
            api.activate()
            self._stream = api.create_stream()
            self._module = api.load(code)
        except BaseException:
            self.close()
            raise

    # Memory ----------------------------------------------------------------------------------------------------------

    def available_memory(self) -> int:
        self._api.activate()
        return self._api.free_memory()

    def allocate(self, nbytes: int, place: Place) -> StreamBlock:
        self._api.activate()
        if place is Place.DEVICE:
            block = StreamBlock(self._api.allocate(nbytes), nbytes)
        else:
            host, address = self._api.allocate_host(nbytes)
            mapped = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))
            block = StreamBlock(address, nbytes, host, mapped)
        self._blocks.add(block)
        return block

    def release(self, block: StreamBlock) -> None:
        self._api.activate()
        self._blocks.remove(block)
        self._free(block)

    def _free(self, block: StreamBlock) -> None:
        if block.mapped is None:
            self._api.free(block.address)
        else:
            self._api.free_host(block.host)

    def clear(self, block: StreamBlock) -> None:
        self._api.activate()
        self._api.fill(block.address, block.nbytes, self._stream)

    def copy(self, source: StreamBlock, source_offset: int, target: StreamBlock, target_offset: int,
             nbytes: int) -> None:
        self._api.activate()
        self._api.copy(target.address + target_offset, source.address + source_offset, nbytes, self._stream)

    # Runs ------------------------------------------------------------------------------------------------------------

    def record(self, calls: Sequence[Call]) -> Graph:
        self._api.activate()
        for call in calls:
            self._function(call.kernel)  # loading code is not allowed in a capture
        graph = self._capture(calls)
        try:
            recording = Graph(self._api.instantiate(graph), tuple(calls))
            self._graphs.add(recording)
        finally:
            self._api.destroy_graph(graph)
        return recording

    def _capture(self, calls: Sequence[Call]) -> int:
        self._api.begin_capture(self._stream)
        try:
            for call in calls:
                self._launch(call)
        except BaseException:
            with suppress(TargetError):  # the first failure is the one to tell
                self._api.destroy_graph(self._api.end_capture(self._stream))
            raise
        return self._api.end_capture(self._stream)

    def _launch(self, call: Call) -> None:
        values = np.array([b.block.address + b.offset for b in call.buffers], np.uint64).tobytes() + call.scalars
        held = ctypes.create_string_buffer(values, len(values))
        begin, pointers = ctypes.addressof(held), 8 * len(call.buffers)
        places = [*range(0, pointers, 8), *range(pointers, len(values), 4)]
        addresses = (ctypes.c_void_p * len(places))(*(begin + place for place in places))
        self._api.launch(self._function(call.kernel), call.groups, call.kernel.threads, ctypes.addressof(addresses),
                         self._stream)

    def _function(self, kernel: Kernel) -> int:
        if kernel.symbol not in self._functions:
            self._functions[kernel.symbol] = self._api.function(self._module, kernel.symbol)
        return self._functions[kernel.symbol]

    def discard(self, recording: Graph) -> None:
        self._api.activate()
        self._graphs.remove(recording)
        self._api.destroy_executable(recording.executable)

    def submit(self, recording: Graph) -> None:
        self._api.activate()
        self._api.launch_graph(recording.executable, self._stream)

    def wait(self) -> None:
        self._api.activate()
        if self._hangs:
            raise self._hang()
        started = time.monotonic()
        while not self._api.is_done(self._stream):
            waited = time.monotonic() - started
            if waited > self._hang_seconds:
                self._hangs = True
                raise self._hang()
            if waited > _SPIN_SECONDS:  # at first every microsecond counts
                time.sleep(_SLEEP_SECONDS)

    def _hang(self) -> TargetError:
        return TargetError(f"{self.info.name} hangs: it has not finished after {self._hang_seconds:.0f} s; end what "
                           "else uses it, or restart it")

    def time(self, recording: Graph) -> np.ndarray:
        self._api.activate()
        while len(self._events) <= len(recording.calls):
            self._events.append(self._api.create_event())
        self._api.record_event(self._events[0], self._stream)
        for call, event in zip(recording.calls, self._events[1:], strict=False):
            self._launch(call)
            self._api.record_event(event, self._stream)
        self.wait()
        between = pairwise(self._events[: len(recording.calls) + 1])
        return np.array([self._api.seconds_between(first, last) for first, last in between])

    # End -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy everything. What a device that hangs still uses is left to the end of the process."""
        if self._hangs:
            return
        if self._stream:
            with suppress(TargetError):  # a device that is lost runs nothing
                self.wait()
        if self._hangs:
            return
        steps: list[Callable[[], None]] = [partial(self._api.destroy_executable, g.executable) for g in self._graphs]
        steps += [partial(self._free, block) for block in self._blocks]
        steps += [partial(self._api.destroy_event, event) for event in self._events]
        steps += [partial(self._api.unload, self._module)] if self._module else []
        steps += [partial(self._api.destroy_stream, self._stream)] if self._stream else []
        for step in [*steps, self._api.close]:
            with suppress(TargetError):  # a device may be lost; the rest is to go all the same
                step()
