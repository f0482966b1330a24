"""A GPU as a device: memory, staging, weights and replays over any `driver.Driver`.

Owns what is alike on all of them: lifetimes, counters, limits, the order of things. Knows no driver's calls.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.driver import ALIGNMENT, Binding, Block, Call, Driver, Place
from dflashc.runtime.device.fitting import check_fits, check_kernel
from dflashc.runtime.device.kernels import KernelTable, check_launch, scalar_word
from dflashc.runtime.device.staging import STAGING_BYTES, Staging
from dflashc.runtime.device.weight_blocks import weight_blocks
from dflashc.runtime.errors import ArtefactError, TargetError
from dflashc.runtime.plan import Launch, Operand


class _Held:
    """Keeps an object of the driver for as long as anything refers to it."""

    def __init__(self, thing: object, retired: deque[object]) -> None:
        self.thing = thing
        # Not given back here and now: this may run at any time, in the midst of another call to the driver.
        weakref.finalize(self, retired.append, thing).atexit = False


class GpuMemory:
    """A part of a block of device memory."""

    def __init__(self, held: _Held, offset: int, nbytes: int) -> None:
        self._held = held
        self.offset = offset
        self.nbytes = nbytes

    @property
    def block(self) -> Block:
        block: Block = self._held.thing  # type: ignore[assignment]
        return block

    def view(self, offset: int, nbytes: int | None = None) -> GpuMemory:
        """The part that starts at `offset` bytes."""
        size = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + size} of {self.nbytes}")
        return GpuMemory(self._held, self.offset + offset, size)


class GpuReplay:
    """A recording, and all memory that it uses."""

    def __init__(self, device: GpuDevice, held: _Held, memories: Mapping[str, GpuMemory], launches: int) -> None:
        self._device = device
        self._launches = launches
        self._held = held
        self._memories = dict(memories)

    def run(self) -> None:
        """One run; returns when all launches are done."""
        self._device.submit(self._held.thing)

    def seconds(self) -> np.ndarray:
        """See `base.Replay.seconds`."""
        return self._device.time(self._held.thing)

    def ticks(self) -> np.ndarray:
        """See `base.Replay.ticks`: launches are timed by `seconds` alone."""
        return np.zeros(self._launches, np.int64)


class GpuDevice:
    """Runs the kernels of an artefact on a GPU.

    Parameters
    ----------
    driver : Driver
        An open GPU with these kernels; the device closes it.
    notes : sequence of str
        What the user should know of it.

    Use as a context manager, or `close` it. An interrupt may come at any time: what was submitted is waited for before
    anything else is done.
    """

    def __init__(self, driver: Driver, table: KernelTable, artefact: Artefact, notes: Sequence[str] = ()) -> None:
        self.info = driver.info
        self.name = driver.info.name
        self.identity = f"{driver.info.name}, {driver.info.driver}"
        self.notes = list(notes)
        self.uploaded = self.downloaded = self.synchronisations = 0
        self._driver = driver
        self._table = table
        self._artefact = artefact
        self._retired_blocks: deque[object] = deque()
        self._retired_recordings: deque[object] = deque()
        self._weights: dict[str, GpuMemory] | None = None
        self._in_flight = False  # a run that an interrupt left behind
        self._queued = False  # copies and fills
        self._closed = False
        self._staging = Staging(self._allocate_staging, self._copy, self._wait)

    def __enter__(self) -> GpuDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Memory ------------------------------------------------------------------------------------------------------

    def check_memory(self, artefact: Artefact, context: int) -> None:
        """See `base.Device.check_memory`."""
        self._collect()
        check_fits(artefact, context, self._driver.info, self._driver.available_memory(), self._weights is not None)

    def alloc(self, nbytes: int, shared: bool = False) -> GpuMemory:
        """See `base.Device.alloc`."""
        memory = self._allocate(nbytes, Place.SHARED if shared else Place.DEVICE)
        if memory.block.mapped is not None:
            memory.block.mapped[:] = 0
        else:
            self._queued = True
            self._driver.clear(memory.block)
        return memory

    def weights(self, artefact: Artefact) -> dict[str, GpuMemory]:
        """See `base.Device.weights`. Each reaches to the end of what launches read behind it, see `Plan.adjacent`."""
        if artefact.directory != self._artefact.directory:
            raise TargetError(f"this device was opened for {self._artefact.directory}, not for {artefact.directory}")
        if self._weights is None:
            self._weights = self._load_weights()
        return self._weights

    def _load_weights(self) -> dict[str, GpuMemory]:
        memories: dict[str, GpuMemory] = {}
        with self._artefact.weights.open("rb", buffering=0) as file:
            for block in weight_blocks(self._artefact.manifest.weights, self._artefact.plan.adjacent):
                memory = self._allocate(block.nbytes, Place.DEVICE)
                file.seek(block.offset)
                self._staging.read(file, memory.block, block.nbytes)
                self.uploaded += block.nbytes
                memories |= {p.name: memory.view(p.offset - block.offset, p.nbytes) for p in block.parts}
        return memories

    def _allocate(self, nbytes: int, place: Place) -> GpuMemory:
        self._collect()
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        return GpuMemory(_Held(self._driver.allocate(size, place), self._retired_blocks), 0, nbytes)

    def _allocate_staging(self) -> Block:
        return self._driver.allocate(STAGING_BYTES, Place.STAGING)

    # Transfers ---------------------------------------------------------------------------------------------------

    def upload(self, memory: GpuMemory, data: np.ndarray, offset: int = 0) -> None:
        """See `base.Device.upload`."""
        self._settle()
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        target = memory.view(offset, flat.size)
        if memory.block.mapped is not None:
            memory.block.mapped[target.offset : target.offset + flat.size] = flat
        else:
            self._staging.upload(flat, memory.block, target.offset)
        self.uploaded += flat.size

    def download(self, memory: GpuMemory, dtype: str, count: int, offset: int = 0) -> np.ndarray:
        """`count` elements from `offset` bytes on, (count,)."""
        self._settle()
        result = np.empty(count, dtype)
        flat = result.view(np.uint8)
        source = memory.view(offset, flat.size)
        if memory.block.mapped is not None:
            flat[:] = memory.block.mapped[source.offset : source.offset + flat.size]
        else:
            self._staging.download(memory.block, source.offset, flat)
        self.downloaded += flat.size
        return result

    # Runs --------------------------------------------------------------------------------------------------------

    def record(self, launches: Sequence[Launch], memories: Mapping[str, GpuMemory], context: int) -> GpuReplay:
        """Bind launches to memory.

        Parameters
        ----------
        memories : mapping
            Buffers and weights by the names the operands use.
        context : int
            Context capacity in tokens, the value of "context" operands.
        """
        self._collect()
        calls = [self._call(launch, memories, context) for launch in launches]
        return GpuReplay(self, _Held(self._driver.record(calls), self._retired_recordings), memories, len(launches))

    def _call(self, launch: Launch, memories: Mapping[str, GpuMemory], context: int) -> Call:
        kernel = self._table.kernel(launch.kernel)
        check_launch(launch, kernel)
        check_kernel(kernel, self.info)  # a variant may be beyond limits that the default keeps
        buffers, scalars = [], b""
        for operand in launch.operands:
            if operand.kind in ("weight", "buffer"):
                buffers.append(_binding(launch, operand, memories[operand.name], context))
            else:
                scalars += scalar_word(operand, context)
        return Call(kernel, tuple(buffers), scalars, launch.units.multiple, launch.barrier)

    def submit(self, recording: object) -> None:
        """Run a recording and wait for it."""
        self._settle()
        self._in_flight = True
        self._driver.submit(recording)
        self._wait()

    def time(self, recording: object) -> np.ndarray:
        """Run the calls of a recording one by one; seconds of each."""
        self._settle()
        self._in_flight = True
        seconds = self._driver.time(recording)
        self._done()
        return seconds

    def copy_bandwidth(self, nbytes: int = 256 << 20, repeats: int = 8) -> float:
        """Bytes per second that device memory reads and writes when it is copied: the best of `repeats` copies."""
        size = min(nbytes, self._driver.info.limits.allocation, self._driver.available_memory() // 4)
        source, target = self.alloc(size), self.alloc(size)
        best = float("inf")
        for _ in range(repeats + 1):  # the first waits for the memory to be cleared
            started = time.perf_counter()
            self._copy(source.block, 0, target.block, 0, source.nbytes)
            self._wait()
            best = min(best, time.perf_counter() - started)
        return 2 * source.nbytes / best

    def _copy(self, source: Block, source_offset: int, target: Block, target_offset: int, nbytes: int) -> None:
        self._queued = True
        self._driver.copy(source, source_offset, target, target_offset, nbytes)

    def _wait(self) -> None:
        self._driver.wait()
        self._done()

    def _done(self) -> None:
        self._in_flight = self._queued = False
        self._staging.restart()
        self.synchronisations += 1

    def _settle(self) -> None:
        """Wait for what an interrupt left running."""
        if self._closed:
            raise TargetError(f"{self.name} was closed; open the artefact again")
        if self._in_flight:
            self._wait()

    # Ends --------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Give back what nothing refers to any more."""
        self._settle()
        while self._retired_recordings:
            self._driver.discard(self._retired_recordings.popleft())
        if self._retired_blocks and self._queued:
            self._wait()  # what is queued may use them
        while self._retired_blocks:
            self._driver.release(self._retired_blocks.popleft())

    def close(self) -> None:
        """Give everything back. The device and all that came from it must not be used afterwards."""
        if not self._closed:
            self._closed = True
            self._weights = None
            self._driver.close()


def _binding(launch: Launch, operand: Operand, memory: GpuMemory, context: int) -> Binding:
    offset = operand.offset(context)
    begin = memory.offset + offset
    if begin % ALIGNMENT or not 0 <= offset < memory.nbytes:
        raise ArtefactError(f"launch {launch.operation!r} uses {operand.name} from byte {offset:,} on, expected a "
                            f"multiple of {ALIGNMENT} below {memory.nbytes:,}: build again")
    # Blocks end at the alignment, so that kernels may read the last bytes as whole words.
    return Binding(memory.block, begin, -(-(memory.nbytes - offset) // ALIGNMENT) * ALIGNMENT)
