"""The way between the host and device memory that it does not see: in pieces, through a buffer that both see.

Copies are queued, so that an upload waits only where the buffer is full. Knows nothing of what is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO

import numpy as np

from dflashc.runtime.device.driver import ALIGNMENT, Block
from dflashc.runtime.errors import ArtefactError

STAGING_BYTES = 32 << 20
PIECE_BYTES = 8 << 20  # of a file: read while the piece before is copied

Copy = Callable[[Block, int, Block, int, int], None]
"""copy(source, offset, target, offset, bytes): as `Driver.copy`."""


class Staging:
    """Copies in and out of blocks that are not mapped.

    Parameters
    ----------
    allocate : callable
        Makes the buffer, at the first copy.
    copy : callable
        Queues a copy.
    wait : callable
        Waits for everything queued, and calls `restart`.
    """

    def __init__(self, allocate: Callable[[], Block], copy: Copy, wait: Callable[[], None]) -> None:
        self._allocate = allocate
        self._copy = copy
        self._wait = wait
        self._block: Block | None = None
        self._used = 0

    def restart(self) -> None:
        """Everything queued is done: the buffer is free."""
        self._used = 0

    def upload(self, data: np.ndarray, target: Block, offset: int) -> None:
        """Queue a copy of `data`, uint8 (n,), to `offset` of `target`."""
        done = 0
        while done < data.size:
            block, place, size = self._take(data.size - done)
            _mapped(block)[place : place + size] = data[done : done + size]
            self._copy(block, place, target, offset + done, size)
            done += size

    def read(self, file: FileIO, target: Block, nbytes: int) -> None:
        """Copy the next `nbytes` of a file to the beginning of `target`, which may be mapped."""
        done = 0
        while done < nbytes:
            piece = min(nbytes - done, PIECE_BYTES)
            if target.mapped is not None:
                _fill(file, target.mapped[done : done + piece])
            else:
                block, place, piece = self._take(piece)
                _fill(file, _mapped(block)[place : place + piece])
                self._copy(block, place, target, done, piece)
            done += piece

    def download(self, source: Block, offset: int, result: np.ndarray) -> None:
        """Copy from `offset` of `source` to `result`, uint8 (n,), after all that came before."""
        done = 0
        while done < result.size:
            block, place, size = self._take(result.size - done)
            self._copy(source, offset + done, block, place, size)
            self._wait()
            result[done : done + size] = _mapped(block)[place : place + size]
            done += size

    def _take(self, wanted: int) -> tuple[Block, int, int]:
        """The buffer, and where in it at most `wanted` bytes are free: offset and size."""
        if self._block is None:
            self._block = self._allocate()
        if self._used == self._block.nbytes:
            self._wait()
        place = self._used
        size = min(wanted, self._block.nbytes - place)
        self._used = min(-(-(place + size) // ALIGNMENT) * ALIGNMENT, self._block.nbytes)
        return self._block, place, size


def _mapped(block: Block) -> np.ndarray:
    assert block.mapped is not None, "staging memory is mapped"
    return block.mapped


def _fill(file: FileIO, piece: np.ndarray) -> None:
    """Read exactly as many bytes as `piece` has."""
    view, read = piece.data, 0
    while read < piece.size:
        count = file.readinto(view[read:])
        if not count:
            raise ArtefactError(f"{file.name} ended early: it was changed while it was read; build again")
        read += count
