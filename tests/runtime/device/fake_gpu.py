"""A GPU that is not there, strict about how it is used: what CUDA and HIP have in common, for the tiny kernels.

Work is queued and done only when the stream is asked for it: nothing works by chance. Wrong use is an assertion:
freed, unwritten or unbound memory, sizes out of range, handles twice destroyed, a capture disturbed.
Any call can be made to fail, by its number. `fake_cuda` and `fake_hip` give it the names of an API.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from tests.runtime.device.tiny import KERNELS

OUT_OF_MEMORY, NOT_READY, UNKNOWN = 2, 600, 999

MAGIC = b"module with kernels: "


def module_code() -> bytes:
    """Code that the fake loads."""
    return MAGIC + " ".join(KERNELS).encode()


@dataclass(eq=False)
class Memory:
    """An allocation: `written` tells which bytes have a value."""

    address: int
    data: np.ndarray
    written: np.ndarray
    freed: bool = False


@dataclass(frozen=True)
class Work:
    """Something queued, and the memory that it uses."""

    do: Callable[[], object]
    uses: tuple[Memory, ...] = ()


@dataclass
class FakeGpu:
    """The device.

    Attributes
    ----------
    names : list of str
        Calls so far.
    fail_at : int or None
        Number of the call to fail, from 1.
    failed : str
        Name of the call that was failed.
    live : set
        What was made and not destroyed, as (kind, handle).
    stuck : bool
        Whether queued work is never done.
    """

    level: str = "sm_89"
    total: int = 1 << 30
    names: list[str] = field(default_factory=list)
    fail_at: int | None = None
    failed: str = ""
    live: set[tuple[str, int]] = field(default_factory=set)
    stuck: bool = False
    negligible: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._handles = count(0x1000)
        self._addresses = count(0x7000_0000_0000, 1 << 32)
        self._memory: dict[int, Memory] = {}
        self._queue: list[Work] = []
        self._asked = 0
        self._capture: list[Work] | None = None
        self._work: dict[int, list[Work]] = {}  # of graphs and executables
        self._events: dict[int, float] = {}
        self._clock = 0.0

    def fails(self, name: str) -> int:
        """Note a call; an error where it is the one to fail."""
        self.names.append(name)
        if len(self.names) != self.fail_at:
            return 0
        self.failed = name
        if "alloc" in name.lower():
            return OUT_OF_MEMORY
        self._queue.clear()  # the device is lost, and its work with it
        return UNKNOWN

    def make(self, kind: str) -> int:
        handle = next(self._handles)
        self.live.add((kind, handle))
        return handle

    def destroy(self, kind: str, handle: int) -> None:
        assert (kind, handle) in self.live, f"{kind} {handle} is not there"
        self.live.remove((kind, handle))

    # Memory ----------------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        return self.total - sum(m.data.size for m in set(self._memory.values()))

    def allocate(self, nbytes: int, host: bool = False) -> int:
        assert nbytes > 0
        data = np.full(nbytes, 0xA5, np.uint8)  # memory of the host may be written at any time
        memory = Memory(next(self._addresses), data, np.full(nbytes, host))
        address = int(data.ctypes.data) if host else memory.address
        self._memory[memory.address] = self._memory[address] = memory
        self.live.add(("host memory" if host else "memory", address))
        return address

    def device_address(self, host: int) -> int:
        return self._memory[host].address

    def free(self, address: int, host: bool = False) -> None:
        self.destroy("host memory" if host else "memory", address)
        memory = self._memory.pop(address)
        self._memory.pop(memory.address, None)
        assert not any(memory in work.uses for work in self._queue), "freed while queued work uses it"
        memory.freed = True

    def _find(self, address: int, nbytes: int = 1) -> tuple[Memory, int]:
        for begin, memory in self._memory.items():
            if begin <= address < begin + memory.data.size:
                assert address + nbytes <= begin + memory.data.size, "past the end of memory"
                return memory, address - begin
        raise AssertionError(f"no memory at {address:#x}")

    # Work ------------------------------------------------------------------------------------------------------------

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        memory, offset = self._find(address, nbytes)
        self._enqueue(Work(lambda: self._write(memory, offset, np.zeros(nbytes, np.uint8)), (memory,)), stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        (to, to_offset), (of, of_offset) = self._find(target, nbytes), self._find(source, nbytes)
        self._enqueue(Work(lambda: self._write(to, to_offset, self._read(of, of_offset, nbytes)), (to, of)), stream)

    def _enqueue(self, work: Work, stream: int) -> None:
        assert ("stream", stream) in self.live, "no such stream"
        assert self._capture is None, "a capture is disturbed"
        self._queue.append(work)
        self._asked = 0

    @staticmethod
    def _write(memory: Memory, offset: int, data: np.ndarray) -> None:
        assert not memory.freed
        memory.data[offset : offset + data.size] = data
        memory.written[offset : offset + data.size] = True

    @staticmethod
    def _read(memory: Memory, offset: int, nbytes: int) -> np.ndarray:
        assert not memory.freed
        assert memory.written[offset : offset + nbytes].all(), "read before it was written"
        return memory.data[offset : offset + nbytes]

    def is_done(self, stream: int) -> bool:
        """Ask twice: at first the work is still under way."""
        assert ("stream", stream) in self.live, "no such stream"
        self._asked += 1
        if self._queue and (self.stuck or self._asked < 2):
            return False
        queue, self._queue = self._queue, []
        for work in queue:
            work.do()
        return True

    # Kernels ---------------------------------------------------------------------------------------------------------

    def load(self, code: bytes) -> int:
        assert code.startswith(MAGIC), "code that is none"
        return self.make("module")

    def function(self, module: int, symbol: str) -> int:
        assert ("module", module) in self.live
        assert self._capture is None, "a capture is disturbed"
        return list(KERNELS).index(symbol) + 1

    def launch(self, function: int, grid: Sequence[int], block: Sequence[int], parameters: int, stream: int) -> None:
        """Read the parameters, as both APIs do before they return, and queue or capture the launch."""
        symbol = list(KERNELS)[function - 1]
        assert grid[0] >= 1
        assert tuple(grid[1:]) == (1, 1)
        operands = KERNELS[symbol]
        buffers, scalars = operands.count("buffer"), [o for o in operands if o != "buffer"]
        places = (ctypes.c_void_p * len(operands)).from_address(parameters)
        pointers = [ctypes.c_uint64.from_address(place).value for place in places[:buffers]]
        types: list[Any] = [ctypes.c_float if s == "f32" else ctypes.c_int32 for s in scalars]
        values = [t.from_address(place).value for t, place in zip(types, places[buffers:], strict=True)]
        bound = [self._find(pointer) for pointer in pointers]
        assert all(offset % 64 == 0 for _, offset in bound)
        threads = grid[0] * block[0] * block[1] * block[2]
        work = Work(lambda: self._run(symbol, bound, values, threads), tuple(m for m, _ in bound))
        if self._capture is None:
            self._enqueue(work, stream)
        else:
            self._capture.append(work)

    def _run(self, symbol: str, bound: list[tuple[Memory, int]], values: list[Any], threads: int) -> None:
        self._clock += 1e-3  # milliseconds
        n = min(int(values[-1]), threads)
        target, place = bound[1]
        read = [self._read(memory, offset, 4 * n).view(np.float32) for memory, offset in bound[: 1 + (symbol == "add")]]
        result = {"scale": lambda: read[0] * np.float32(values[0]), "add": lambda: read[1] + read[0],
                  "copy": lambda: read[0]}[symbol]()
        self._write(target, place, result.astype(np.float32).view(np.uint8))

    # Graphs and events -----------------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        assert ("stream", stream) in self.live
        assert self._capture is None
        self._capture = []

    def end_capture(self) -> int:
        assert self._capture is not None, "no capture to end"
        graph = self.make("graph")
        self._work[graph], self._capture = self._capture, None
        return graph

    def instantiate(self, graph: int) -> int:
        assert ("graph", graph) in self.live
        executable = self.make("executable")
        self._work[executable] = self._work[graph]
        return executable

    def launch_graph(self, executable: int, stream: int) -> None:
        assert ("executable", executable) in self.live
        for work in self._work[executable]:
            assert not any(memory.freed for memory in work.uses), "a graph uses memory that was freed"
            self._enqueue(work, stream)

    def record_event(self, event: int, stream: int) -> None:
        assert ("event", event) in self.live
        self._enqueue(Work(lambda: self._events.update({event: self._clock})), stream)

    def milliseconds(self, first: int, last: int) -> float:
        assert not self._queue, "events that have not happened"
        return self._events[last] - self._events[first]
