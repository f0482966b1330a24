"""One tensor of a GGUF file: its description and views of its bytes.

Owns access to tensor data through the memory map; knows nothing of the header it was described in.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflashc.runtime.errors import GgufError

from .blocks import DECODABLE, dequantise
from .cursor import shown
from .formats import BlockFormat, describe_unknown

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
    path, offset
        The file that holds the data and where it starts in it.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    type_id: int
    format: BlockFormat | None
    nbytes: int
    path: Path
    offset: int
    _mapping: mmap.mmap = field(repr=False)

    def data(self) -> np.ndarray:
        """The stored bytes: a read-only view `(rows, row_bytes)` of the file, uint8; rows = prod(shape[:-1])."""
        self._known_format()
        flat = np.frombuffer(self._mapping, np.uint8, self.nbytes, self.offset)
        return flat.reshape(math.prod(self.shape[:-1]), -1)

    def array(self) -> np.ndarray:
        """A tensor of plain numbers (F16 F32 F64 I8 I16 I32 I64): a read-only view of the file, of `shape`."""
        if self.type_name not in _DTYPES:
            raise self._error(f"is {self.type_name}, expected one of {' '.join(_DTYPES)}")
        return self.data().view(_DTYPES[self.type_name]).reshape(self.shape)

    def dequantise(self) -> np.ndarray:
        """The values as a new float32 array of `shape`. Meant for small tensors: nothing is streamed."""
        block_format = self._known_format()
        if self.type_name not in DECODABLE:
            raise self._error(f"is {self.type_name}, which cannot be decoded here; requantise to a supported type")
        return dequantise(block_format, self.data()).reshape(self.shape)

    def release(self) -> None:
        """Tell the system that the tensor's pages are not needed for now; they are read again when touched.

        Keeps the resident size of a build that streams through all tensors at that of one tensor.
        """
        self._known_format()
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = self.offset - self.offset % mmap.PAGESIZE  # neighbours on shared pages are merely read again
        self._mapping.madvise(mmap.MADV_DONTNEED, start, self.offset + self.nbytes - start)

    def _known_format(self) -> BlockFormat:
        if self.format is None:
            raise self._error(
                f"has type id {self.type_id}, which is not known here ({describe_unknown(self.type_id)}); "
                "requantise it with llama.cpp"
            )
        return self.format

    def _error(self, message: str) -> GgufError:
        return GgufError(f"{self.path}: tensor {shown(self.name)} {message}")
