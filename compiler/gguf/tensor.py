"""One tensor of a GGUF file: its description, and its data when asked for.

Knows nothing of the header it was described in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dflashc.runtime.errors import GgufError

from .blocks import DECODABLE, dequantise
from .cursor import shown
from .formats import BlockFormat, describe_unknown
from .source import SourceFile

_DTYPES: dict[str, np.dtype] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("<i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """A tensor in the table of a file.

    Attributes
    ----------
    shape
        Row-major (numpy) order: `(out, in)` for a linear layer.
    type_name, type_id
        Such as "Q4_K"; "unknown" for an id that is not in the table of types.
    format
        None when the type is unknown: the tensor is listed, and asking for its data raises `GgufError`.
    nbytes
        Size of the data, 0 when the type is unknown.
    offset
        Where the data starts in its file.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    type_id: int
    format: BlockFormat | None
    nbytes: int
    offset: int
    _file: SourceFile = field(repr=False)
    _stored_rows: int | None = None

    @property
    def path(self) -> Path:
        """The file that holds the data."""
        return self._file.path

    @property
    def rows(self) -> int:
        """prod(shape[:-1])."""
        return math.prod(self.shape[:-1])

    def with_rows(self, rows: int) -> GgufTensor:
        """The first `rows` rows of a matrix; those that the file does not have are zeros, as they are in any format."""
        assert len(self.shape) == 2, f"{self.name} is no matrix"
        assert self._stored_rows is None, f"{self.name} is not as in its file"
        return replace(self, shape=(rows, self.shape[1]), nbytes=rows * (self.nbytes // self.rows),
                       _stored_rows=self.rows)

    def read_rows(self, first: int, count: int) -> np.ndarray:
        """The stored bytes of some rows, uint8 `(count, row_bytes)`. Raises `GgufError` if the file was cut short."""
        self.known_format()
        assert 0 <= first <= first + count <= self.rows, f"rows {first} to {first + count} of {self.rows}"
        row_bytes, stored = self.nbytes // self.rows, self.rows if self._stored_rows is None else self._stored_rows
        there = min(max(stored - first, 0), count)
        data = self._file.read(self.offset + first * row_bytes, there * row_bytes).reshape(there, row_bytes)
        return data if there == count else np.pad(data, ((0, count - there), (0, 0)))

    def data(self) -> np.ndarray:
        """All stored bytes, uint8 `(rows, row_bytes)`. Meant for small tensors: nothing is streamed."""
        return self.read_rows(0, self.rows)

    def array(self) -> np.ndarray:
        """A tensor of plain numbers (F16 F32 F64 I8 I16 I32 I64), of `shape`."""
        if self.type_name not in _DTYPES:
            raise self._error(f"is {self.type_name}, expected one of {' '.join(_DTYPES)}")
        return self.data().view(_DTYPES[self.type_name]).reshape(self.shape)

    def dequantise(self) -> np.ndarray:
        """The values as a float32 array of `shape`. Meant for small tensors: nothing is streamed."""
        block_format = self.known_format()
        if self.type_name not in DECODABLE:
            raise self._error(f"is {self.type_name}, which cannot be decoded here; requantise to a supported type")
        return dequantise(block_format, self.data()).reshape(self.shape)

    def known_format(self) -> BlockFormat:
        """The tensor's format; raises `GgufError` where its type is unknown."""
        if self.format is None:
            raise self._error(
                f"has type id {self.type_id}, which is not known here ({describe_unknown(self.type_id)}); "
                "requantise it with llama.cpp"
            )
        return self.format

    def _error(self, message: str) -> GgufError:
        return GgufError(f"{self.path}: tensor {shown(self.name)} {message}")
