"""The CPU as a device: a shared library of kernels, a pool of threads, launch tables that the library walks.

The executor is native code inside the artefact's own library (see `targets/cpu/executor.ll`), so nothing of TVM is
needed here. Python only fills launch tables and makes one foreign call per run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.errors import ArtefactError, TargetError
from dflashc.runtime.manifest import Requirements
from dflashc.runtime.plan import Launch, Operand
from dflashc.runtime.processors import processor_name

ABI = 3
"""Layout of the launch table, as `dflash_abi` of the library tells it."""

_LINE = 64  # bytes of the table's header, of a launch in it; see executor.ll
_POOL_THREADS, _POOL_STOP, _POOL_WORDS, _INSIDE = 64, 72, 192, 128
_WORDS = 192  # bytes per thread
_BARRIER = 6  # word of a launch
_MOST_UNITS = 1 << 20  # of a launch: what a claim counts to


class HostMemory:
    """Zeroed, 64-byte aligned host memory, or a view of a mapped file."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.address = array.ctypes.data if array.size else 0
        self.nbytes = array.nbytes

    def view(self, offset: int, nbytes: int | None = None) -> HostMemory:
        """The part that starts at `offset` bytes."""
        return HostMemory(self.array[offset : None if nbytes is None else offset + nbytes])

    @staticmethod
    def allocate(nbytes: int) -> HostMemory:
        # An anonymous mapping is zero, page aligned, and costs nothing until it is touched.
        try:
            return HostMemory(np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8))
        except (OSError, OverflowError, ValueError) as error:
            raise TargetError(f"out of memory: {nbytes:,} bytes of host memory asked for; use a smaller "
                              "--ctx") from error


class CpuReplay:
    """A launch table bound to addresses."""

    def __init__(self, device: CpuDevice, table: np.ndarray, ticks: np.ndarray, keep: list[object]) -> None:
        self._device = device
        self._table = table
        self._ticks = ticks
        self._keep = keep
        # A late worker may still walk the table of a run that is long done.
        weakref.finalize(self, device.retire, table)

    def run(self) -> None:
        """One run; returns when all launches are done."""
        self._device.run_table(self._table.ctypes.data)

    def seconds(self) -> np.ndarray:
        """See `base.Replay.seconds`. The counter's rate is not told by the hardware; a run's launches fill the run."""
        before, started = self.ticks(), time.perf_counter()
        self.run()
        total = time.perf_counter() - started
        ticks = self.ticks() - before
        return ticks * (total / max(1, ticks.sum()))

    def ticks(self) -> np.ndarray:
        """Time stamp counter ticks that the calling thread spent in each launch, over all runs: int64 (launches,)."""
        return self._ticks.copy()


class CpuDevice:
    """Runs launch tables with `threads` threads, the caller's among them.

    Parameters
    ----------
    library : Path
        The artefact's shared library.
    threads : int
        Threads that compute; the caller is one of them.

    Several callers take turns, run by run. Use as a context manager, or `close` it.
    """

    def __init__(self, library: Path, threads: int) -> None:
        if threads < 1:
            raise TargetError(f"{threads} threads asked for; expected at least 1")
        self.name = "cpu"
        self.identity = f"{processor_name()}, {threads} thread{'s' * (threads > 1)}"
        self.threads = threads
        self.notes: list[str] = []
        self.uploaded = self.downloaded = self.synchronisations = 0
        try:
            self._library = ctypes.CDLL(str(library))
            version = np.zeros(1, np.int64)
            self._library.dflash_abi(ctypes.c_void_p(version.ctypes.data))
        except (OSError, AttributeError) as error:
            raise ArtefactError(f"cannot load {library}: {error}") from error
        if version[0] != ABI:
            raise ArtefactError(f"{library} has executor version {version[0]}, {ABI} expected: build again")
        self._addresses: dict[str, int] = {}  # of kernels
        self._run = self._library.dflash_run
        self._run.argtypes, self._run.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        self._pool = HostMemory.allocate(_POOL_WORDS + _WORDS * threads)
        self._pool.array.view(np.int64)[_POOL_THREADS // 8] = threads
        # Whoever runs a table leads the workers: one at a time, also where the garbage collector retires a table.
        self._turn = threading.RLock()
        self._empty = _aligned(_LINE)
        self._empty_state = np.zeros(1, np.int64)
        self._empty.view(np.int64)[1] = self._empty_state.ctypes.data
        self._workers = [threading.Thread(target=self._work, args=(i,), daemon=True, name=f"dflash-{i}")
                         for i in range(1, threads)]
        for worker in self._workers:
            worker.start()

    def __enter__(self) -> CpuDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _work(self, thread: int) -> None:
        self._library.dflash_work(ctypes.c_void_p(self._pool.address), ctypes.c_int64(thread))

    def run_table(self, address: int) -> None:
        with self._turn:
            self.synchronisations += 1
            self._run(self._pool.address, address)

    def check_memory(self, artefact: Artefact, context: int) -> None:
        """The kernel gives pages as they are touched, so nothing is known before."""

    def alloc(self, nbytes: int, shared: bool = False) -> HostMemory:
        return HostMemory.allocate(nbytes)

    def weights(self, artefact: Artefact) -> dict[str, HostMemory]:
        """Map the weights read-only; their pages are shared and loaded on first use."""
        with artefact.weights.open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            mapped = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        weights = HostMemory(np.frombuffer(mapped, np.uint8))
        return {w.name: weights.view(w.offset, w.bytes) for w in artefact.manifest.weights}

    def upload(self, memory: HostMemory, data: np.ndarray, offset: int = 0) -> None:
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        memory.array[offset : offset + flat.size] = flat
        self.uploaded += flat.size

    def download(self, memory: HostMemory, dtype: str, count: int, offset: int = 0) -> np.ndarray:
        size = np.dtype(dtype).itemsize * count
        self.downloaded += size
        return memory.array[offset : offset + size].view(dtype).copy()

    def record(self, launches: Sequence[Launch], memories: Mapping[str, HostMemory], context: int) -> CpuReplay:
        """Bind launches to addresses.

        Parameters
        ----------
        memories : mapping
            Buffers and weights by the names the operands use, and "state", whose first int64 is the length n.
        context : int
            Context capacity in tokens, the value of "context" operands.
        """
        table, ticks = _aligned(_LINE * (1 + len(launches))), np.zeros(len(launches), np.int64)
        words = table.view(np.int64).reshape(-1, _LINE // 8)
        words[0, :3] = len(launches), memories["state"].address, ticks.ctypes.data
        # A new width waits for this: arrays are filled whole, not by elements.
        arguments = np.array([_operand_word(o, memories, context) for x in launches for o in x.operands], np.int64)
        first, bound = arguments.ctypes.data, []
        for launch in launches:
            units = launch.units
            if units.at(context) >= _MOST_UNITS:
                raise ArtefactError(f"{launch.operation} has {units.at(context):,} units at {context:,} tokens, fewer "
                                    f"than {_MOST_UNITS:,} can run: use a smaller --ctx")
            bound.append((self._address(launch.kernel), first, units.multiple, units.addend, units.divisor,
                          self._grain(launch)))
            first += 8 * len(launch.operands)
        if launches:
            words[1:, :_BARRIER] = bound
            words[1:, _BARRIER] = [x.barrier for x in launches[:-1]] + [True]  # a run ends when all units are done
        return CpuReplay(self, table, ticks, [arguments, dict(memories)])

    def _grain(self, launch: Launch) -> int:
        """Units a thread claims at a time: as planned, but at most half of its share, so that others can help."""
        if launch.units.divisor:
            return launch.grain
        return max(1, min(launch.grain, -(-launch.units.multiple // (2 * self.threads))))

    def _address(self, kernel: str) -> int:
        if kernel not in self._addresses:
            try:
                self._addresses[kernel] = ctypes.cast(getattr(self._library, kernel), ctypes.c_void_p).value or 0
            except AttributeError as error:
                raise ArtefactError(f"the artefact's library lacks kernel {kernel}: build again") from error
        return self._addresses[kernel]

    def retire(self, table: np.ndarray) -> None:
        """Return when no worker is in `table`, nor will enter it: its memory may go."""
        if not self._workers:
            return
        with self._turn:
            self._run(self._pool.address, self._empty.ctypes.data)
        inside = self._pool.array[_POOL_WORDS:].view(np.int64)[_INSIDE // 8 :: _WORDS // 8]
        while (inside == table.ctypes.data).any():
            time.sleep(0)

    def close(self) -> None:
        """Stop the workers. The device must not be used afterwards."""
        if not self._workers:
            return
        with self._turn:
            self._pool.array.view(np.int32)[_POOL_STOP // 4] = 1
            self._run(self._pool.address, self._empty.ctypes.data)  # moves the sequence on, which wakes sleepers
        for worker in self._workers:
            worker.join()
        self._workers = []


def check_processor(need: Requirements, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise `ArtefactError` unless this CPU has what kernels need."""
    if platform.machine() != need.machine:
        raise ArtefactError(f"this artefact needs a {need.machine} CPU, this machine is {platform.machine()}; "
                            "build it here")
    if not need.features:
        return
    try:
        flags = next((x for x in cpuinfo.read_text().splitlines() if x.startswith("flags")), "")
    except OSError:
        flags = ""
    missing = sorted(set(need.features) - set(flags.partition(":")[2].split()))
    if missing:
        raise ArtefactError(f"this artefact needs a CPU of level {need.level}; this one lacks {', '.join(missing)}: "
                            "build it here, or with --target cpu-x86-64 for any CPU")


def _operand_word(operand: Operand, memories: Mapping[str, HostMemory], context: int) -> int:
    if operand.kind in ("weight", "buffer"):
        return memories[operand.name].address + operand.offset(context)
    if operand.kind == "f32":
        return int(np.float32(operand.value).view(np.int32))
    return context if operand.kind == "context" else int(operand.value)


def _aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes that start at a multiple of 64, so that each launch is one cache line."""
    raw = np.zeros(nbytes + _LINE - 1, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes]
