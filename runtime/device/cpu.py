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

ABI = 2
"""Layout of the launch table, as `dflash_abi` of the library tells it."""

_HEADER, _RECORD, _TICKS, _GROUP = 64, 128, 80, 88  # bytes; see executor.ll
_POOL_WORKERS, _POOL_STOP, _POOL_INSIDE = 72, 88, 128


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
    """A launch table bound to addresses, in two copies that take turns (see executor.ll, `inside`)."""

    def __init__(self, device: CpuDevice, records: np.ndarray, keep: list[object]) -> None:
        self._device = device
        self._tables = [records, _aligned(records.size)]
        self._tables[1][:] = records
        self._keep = keep
        for table in self._tables:
            self._bind_groups(table)
        self._turn = 0
        # A late worker may still walk the table of a run that is long done.
        weakref.finalize(self, device.retire, self._tables)

    @staticmethod
    def _bind_groups(table: np.ndarray) -> None:
        """Turn the index of each record's group end into that record's address."""
        words = table.view(np.int64)
        base = table.ctypes.data + _HEADER
        groups = words[_HEADER // 8 :].reshape(-1, _RECORD // 8)[:, _GROUP // 8]
        groups[:] = base + groups * _RECORD

    def run(self) -> None:
        """One run; returns when all launches are done."""
        self._turn ^= 1
        self._device.run_table(self._tables[self._turn].ctypes.data)

    def seconds(self) -> np.ndarray:
        """See `base.Replay.seconds`. The counter's rate is not told by the hardware; a run's launches fill the run."""
        before, started = self.ticks(), time.perf_counter()
        self.run()
        total = time.perf_counter() - started
        ticks = self.ticks() - before
        return ticks * (total / max(1, ticks.sum()))

    def ticks(self) -> np.ndarray:
        """Time stamp counter ticks that the calling thread spent in each launch, over all runs: int64 (launches,)."""
        columns = (t.view(np.int64)[_HEADER // 8 :].reshape(-1, _RECORD // 8)[:, _TICKS // 8] for t in self._tables)
        return np.sum(list(columns), axis=0)


class CpuDevice:
    """Runs launch tables with `threads` threads, the caller's among them.

    Parameters
    ----------
    library : Path
        The artefact's shared library.
    threads : int
        Threads that compute; the caller is one of them.

    Use as a context manager, or `close` it.
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
        self._pool = HostMemory.allocate(_POOL_INSIDE + 64 * threads)
        self._pool.array.view(np.int64)[_POOL_WORKERS // 8] = threads - 1
        self._empty = _aligned(_HEADER)
        self._empty_state = np.zeros(1, np.int64)
        self._empty.view(np.int64)[1] = self._empty_state.ctypes.data
        self._workers = [threading.Thread(target=self._work, args=(i,), daemon=True, name=f"dflash-{i}")
                         for i in range(threads - 1)]
        for worker in self._workers:
            worker.start()

    def __enter__(self) -> CpuDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _work(self, worker: int) -> None:
        self._library.dflash_work(ctypes.c_void_p(self._pool.address), ctypes.c_int64(worker))

    def run_table(self, address: int) -> None:
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
        records = _aligned(_HEADER + _RECORD * len(launches))
        header = records[:_HEADER].view(np.int64)
        header[0], header[1] = len(launches), memories["state"].address
        words = records[_HEADER:].view(np.int64).reshape(-1, _RECORD // 8)
        # A new width waits for this: arrays are filled whole, not by elements.
        arguments = np.array([_operand_word(o, memories, context) for x in launches for o in x.operands], np.int64)
        first, heads, ends, end = arguments.ctypes.data, [], [], len(launches) - 1
        for launch in launches:
            units = launch.units
            heads.append((self._address(launch.kernel), first, units.multiple, units.addend, units.divisor,
                          self._grain(launch)))
            first += 8 * len(launch.operands)
        for index in reversed(range(len(launches))):
            end = index if launches[index].barrier else end
            ends.append(end)
        if launches:
            words[:, :6], words[:, _GROUP // 8] = heads, ends[::-1]
        return CpuReplay(self, records, [arguments, dict(memories)])

    def _grain(self, launch: Launch) -> int:
        """Units a thread claims at a time: as planned, but so that every thread gets some of them."""
        if launch.units.divisor:
            return launch.grain
        return max(1, min(launch.grain, launch.units.multiple // (4 * self.threads)))

    def _address(self, kernel: str) -> int:
        if kernel not in self._addresses:
            try:
                self._addresses[kernel] = ctypes.cast(getattr(self._library, kernel), ctypes.c_void_p).value or 0
            except AttributeError as error:
                raise ArtefactError(f"the artefact's library lacks kernel {kernel}: build again") from error
        return self._addresses[kernel]

    def retire(self, tables: Sequence[np.ndarray]) -> None:
        """Return when no worker is in one of `tables`, nor will enter it: their memory may go."""
        if not self._workers:
            return
        self._run(self._pool.address, self._empty.ctypes.data)
        inside = self._pool.array.view(np.int64)[_POOL_INSIDE // 8 :: 8]
        addresses = [table.ctypes.data for table in tables]
        while np.isin(inside, addresses).any():
            time.sleep(0)

    def close(self) -> None:
        """Stop the workers. The device must not be used afterwards."""
        if not self._workers:
            return
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
    """Zeroed bytes that start at a multiple of 128, so that each record owns its cache lines."""
    raw = np.zeros(nbytes + 127, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + nbytes]
