"""Bounded reading of a GGUF header, no further than it reaches.

Owns every check of a count or length against what is left of the file; knows nothing of what the fields mean.
"""

from __future__ import annotations

import struct
from typing import NoReturn

from dflashc.runtime.errors import GgufError

from .source import SourceFile

MAX_HEADER_BYTES = 128 << 20  # metadata and tensor table; 262,144 tokens with their merges take about 20 MB
MAX_STRING_BYTES = 16 << 20
_STEP_BYTES = 1 << 18  # read at a time

_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")


def shown(name: str) -> str:
    """A name from a file, safe to print: escaped, on one line, cut when long."""
    return repr(name if len(name) <= 80 else name[:80] + "…")


class Cursor:
    """A position in the header of one file. Every read is checked before it happens and raises `GgufError`.

    Attributes
    ----------
    buffer
        The file's bytes up to `position` at least.
    """

    def __init__(self, file: SourceFile) -> None:
        self.path = file.path
        self.buffer = bytearray()
        self.position = 0
        self._file = file
        self._end = min(file.size, MAX_HEADER_BYTES)

    def fail(self, message: str) -> NoReturn:
        """Raise the error, naming the file."""
        raise GgufError(f"{self.path}: {message}")

    def take(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they start."""
        start = self.position
        if start + size > self._end:
            self._out_of_bounds(start, size, what)
        self.position = start + size
        self._fill(self.position)
        return start

    def _fill(self, end: int) -> None:
        """Have the bytes before `end`, which the file has."""
        filled = len(self.buffer)
        if end > filled:
            self.buffer += self._file.read(filled, min(max(end - filled, _STEP_BYTES), self._file.size - filled)).data

    def uint32(self, what: str) -> int:
        return int(_UINT32.unpack_from(self.buffer, self.take(4, what))[0])

    def uint64(self, what: str) -> int:
        return int(_UINT64.unpack_from(self.buffer, self.take(8, what))[0])

    def count(self, what: str, limit: int, item_bytes: int) -> int:
        """A 64-bit count of items that take at least `item_bytes` each, which must fit in the rest of the file."""
        count = self.uint64(what)
        if count > limit:
            self.fail(f"{what} is {count}, the limit is {limit}")
        if count * item_bytes > self._end - self.position:
            self._out_of_bounds(self.position, count * item_bytes, f"{what} {count}")
        return count

    def skip_string(self, what: str, limit: int = MAX_STRING_BYTES) -> tuple[int, int]:
        """Step over a string and return where its bytes start and how many there are."""
        length = self.uint64(f"the length of {what}")
        if length > limit:
            self.fail(f"{what} at offset {self.position} is {length} bytes long, the limit is {limit}")
        return self.take(length, what), length

    def string(self, what: str, limit: int) -> str:
        """A short string, decoded."""
        start, length = self.skip_string(what, limit)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError:
            beginning = bytes(self.buffer[start : start + min(length, 40)])
            self.fail(f"{what} at offset {start} is not valid UTF-8: {beginning!r}")

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings. Vocabularies have hundreds of thousands, hence the loop without calls."""
        buffer, position, last, unpack_from = self.buffer, self.position, self._end - 8, _UINT64.unpack_from
        filled = len(buffer)
        for index in range(count):
            if position + 8 > filled:
                if position > last:
                    self._out_of_bounds(position, 8, f"the length of string {index} of {what}")
                self._fill(position + 8)
                filled = len(buffer)
            (length,) = unpack_from(buffer, position)
            if length > MAX_STRING_BYTES:
                self.fail(f"string {index} of {what} is {length} bytes long, the limit is {MAX_STRING_BYTES}")
            position += 8 + length
        self.position = position
        self.take(0, f"the last string of {what}")

    def _out_of_bounds(self, start: int, size: int, what: str) -> NoReturn:
        if self._end < self._file.size:
            self.fail(f"the header is larger than {MAX_HEADER_BYTES} bytes, at {what}")
        self.fail(f"truncated file: {what} needs {size} bytes at offset {start}, the file ends at {self._end}")
