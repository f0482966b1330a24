"""A file that is read piece by piece, and known to have been cut short or changed meanwhile.

No memory map: where a mapped file is cut short, touching what is gone ends the process, while a read says so. Knows
nothing of what is in the file.
"""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

import numpy as np

from dflashc.runtime.errors import GgufError


class SourceFile:
    """An opened regular file that is not empty.

    Attributes
    ----------
    size
        Bytes of the file when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Raises `GgufError` for what cannot be read."""
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would wait for its writer
                raise GgufError(f"{path}: not a regular file")
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise GgufError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._identity = _identity(os.fstat(self._descriptor))
        self.size = os.fstat(self._descriptor).st_size
        if self.size == 0:
            raise GgufError(f"{path}: the file is empty")

    def read(self, offset: int, count: int) -> np.ndarray:
        """`count` bytes from `offset` on, as a new uint8 array. Raises `GgufError` when they are there no more."""
        array = np.empty(count, np.uint8)
        done = 0
        while done < count:
            try:
                got = os.preadv(self._descriptor, [array[done:].data], offset + done)
            except OSError as error:
                raise GgufError(f"{self.path}: cannot be read at offset {offset + done}: {error.strerror}") from error
            if got == 0:
                raise GgufError(f"{self.path}: the file was cut short while it was read: it ends at {offset + done}, "
                                f"{self.size} bytes expected")
            done += got
        return array

    def check_unchanged(self) -> None:
        """Raise `GgufError` unless the file of this name is the one that was opened, as it was then."""
        try:
            same = _identity(self.path.stat()) == self._identity
        except OSError:
            same = False
        if not same:
            raise GgufError(f"{self.path}: the file was changed while it was read; read it again when it is whole")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
