"""One GGUF file: header, metadata, tensor table.

Owns the layout of a single file and its checks; knows nothing of split models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUFValueType

from .cursor import Cursor, shown
from .formats import FORMATS_BY_ID
from .getters import TypedGetters
from .metadata import MAX_KEYS, MIN_KEY_BYTES, Metadata
from .source import SourceFile
from .tensor import GgufTensor

MAX_TENSORS = 1 << 16
MAX_TENSOR_NAME_BYTES = 256  # the format says 64; some forks write longer names, and nothing here cuts them
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16

_VERSIONS = (2, 3)
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # length of an empty name, dimension count, one dimension, type, offset

_OTHER_MAGICS = {
    b"vers": "a Git LFS pointer: the model itself was not downloaded",
    b"PK\x03\x04": "a zip archive, such as a PyTorch checkpoint",
    b"lmgg": "a GGML file from before GGUF",
    b"fmgg": "a GGML file from before GGUF",
    b"tjgg": "a GGJT file from before GGUF",
}


@dataclass(frozen=True)
class Shard(TypedGetters):
    """One opened file; `tensors` in file order."""

    file: SourceFile
    version: int
    metadata: Metadata
    tensors: dict[str, GgufTensor]

    @property
    def path(self) -> Path:
        return self.file.path


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    table_offset: int
    shape: tuple[int, ...]
    type_id: int
    data_offset: int


def read_shard(path: Path) -> Shard:
    """Open one file and read its header; no tensor data is touched. Raises `GgufError`."""
    file = SourceFile(path)
    cursor = Cursor(file)
    version = _read_version(cursor)
    n_tensors = cursor.count("the tensor count", MAX_TENSORS, _MIN_TENSOR_BYTES)
    n_keys = cursor.count("the key count", MAX_KEYS, MIN_KEY_BYTES)
    metadata = Metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    entries = _read_table(cursor, n_tensors)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {name: _locate(cursor, file, name, entry, data_start) for name, entry in entries.items()}
    return Shard(file, version, metadata, tensors)


def _read_version(cursor: Cursor) -> int:
    start = cursor.take(4, "the magic")
    magic = bytes(cursor.buffer[start : start + 4])
    if magic != GGUF_MAGIC.to_bytes(4, "little"):
        hint = _OTHER_MAGICS.get(magic, f"its first bytes are {magic!r}")
        cursor.fail(f"not a GGUF file, {hint}")
    version = cursor.uint32("the version")
    if version in _VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, *_VERSIONS):
        cursor.fail("big-endian GGUF file, only little-endian files are read; convert it with gguf_convert_endian.py")
    cursor.fail(f"GGUF version {version}, only 2 and 3 are read; convert the model again with a current llama.cpp")


def _alignment(cursor: Cursor, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return GGUF_DEFAULT_ALIGNMENT
    field = metadata.fields[key]
    if field.kind is not GGUFValueType.UINT32 or field.count is not None:
        cursor.fail(f"key '{key}' holds {field.type_name}, expected UINT32")
    value = metadata[key]
    assert isinstance(value, int)
    if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        cursor.fail(f"key '{key}' is {value}, expected a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_table(cursor: Cursor, n_tensors: int) -> dict[str, _TensorEntry]:
    entries: dict[str, _TensorEntry] = {}
    for index in range(n_tensors):
        table_offset = cursor.position
        name = cursor.string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        if name in entries:
            first = entries[name].table_offset
            cursor.fail(f"tensor {shown(name)} occurs twice, at offsets {first} and {table_offset}")
        what = f"tensor {shown(name)}"
        n_dims = cursor.uint32(f"the dimension count of {what}")
        if not 1 <= n_dims <= MAX_DIMENSIONS:
            cursor.fail(f"{what} has {n_dims} dimensions, expected 1 to {MAX_DIMENSIONS}")
        # On disk the fastest dimension comes first.
        shape = tuple(cursor.uint64(f"a dimension of {what}") for _ in range(n_dims))[::-1]
        if 0 in shape:
            cursor.fail(f"{what} has a dimension of 0: {shape}")
        type_id = cursor.uint32(f"the type of {what}")
        entries[name] = _TensorEntry(table_offset, shape, type_id, cursor.uint64(f"the offset of {what}"))
    return entries


def _locate(cursor: Cursor, file: SourceFile, name: str, entry: _TensorEntry, data_start: int) -> GgufTensor:
    """Check the extent of one tensor. Offsets are taken as they are: padding and order are the writer's affair."""
    offset = data_start + entry.data_offset
    block_format = FORMATS_BY_ID.get(entry.type_id)
    if block_format is None:
        return GgufTensor(name, entry.shape, "unknown", entry.type_id, None, 0, offset, file)
    columns = entry.shape[-1]
    if columns % block_format.block_size:
        cursor.fail(
            f"tensor {shown(name)} has rows of {columns} elements, not a multiple of the "
            f"{block_format.block_size} of a {block_format.name} block"
        )
    row_bytes = columns // block_format.block_size * block_format.block_bytes
    nbytes = math.prod(entry.shape[:-1]) * row_bytes
    if offset + nbytes > file.size:
        cursor.fail(
            f"truncated file: tensor {shown(name)} {entry.shape} needs {nbytes} bytes at offset {offset}, "
            f"the file ends at {file.size}"
        )
    return GgufTensor(name, entry.shape, block_format.name, entry.type_id, block_format, nbytes, offset, file)
