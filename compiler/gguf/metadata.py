"""The key-value section of a GGUF file: a lazy mapping.

Owns the walk over the section and the decoding of values on first use; knows nothing of what any key means.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGUFValueType

from .cursor import Cursor, shown

MAX_KEYS = 1 << 16
MIN_KEY_BYTES = 8 + 4 + 1  # length of an empty key, type, smallest value
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_ARRAY_ITEMS = 1 << 22

Value = int | float | bool | str | np.ndarray | list[str]

_DTYPES: dict[GGUFValueType, np.dtype] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("<u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class Field:
    """Where one value lies. `count` is None for a scalar; `offset` is that of the key, `start` that of the value."""

    offset: int
    kind: GGUFValueType
    count: int | None
    start: int

    @property
    def type_name(self) -> str:
        return self.kind.name if self.count is None else f"array of {self.kind.name}"


class Metadata(Mapping[str, Value]):
    """Keys in file order; a value is decoded and kept when it is first asked for.

    Scalars are Python `int`, `float`, `bool` or `str`; arrays are read-only numpy arrays, or `list[str]`.
    Looking up a string that is not valid UTF-8 raises `GgufError`.
    """

    def __init__(self, cursor: Cursor, n_keys: int) -> None:
        self.path = cursor.path
        self._cursor = cursor
        self._values: dict[str, Value] = {}
        self.fields: dict[str, Field] = {}
        for index in range(n_keys):
            offset = cursor.position
            key = cursor.string(f"key {index}", MAX_KEY_BYTES)
            if key in self.fields:
                cursor.fail(f"key {shown(key)} occurs twice, at offsets {self.fields[key].offset} and {offset}")
            self.fields[key] = _skip_value(cursor, key, offset)

    def __getitem__(self, key: str) -> Value:
        if key not in self._values:
            self._values[key] = self._decode(key, self.fields[key])
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self.fields

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def _decode(self, key: str, field: Field) -> Value:
        if field.kind is GGUFValueType.STRING:
            strings = self._strings(key, field.start, 1 if field.count is None else field.count)
            return strings[0] if field.count is None else strings
        count = 1 if field.count is None else field.count
        dtype = _DTYPES[field.kind]
        raw = self._cursor.buffer[field.start : field.start + count * dtype.itemsize]
        values: np.ndarray = np.frombuffer(raw, dtype)
        if field.kind is GGUFValueType.BOOL:
            values = values != 0
        values.flags.writeable = False
        return values if field.count is not None else values[0].item()

    def _strings(self, key: str, position: int, count: int) -> list[str]:
        buffer, unpack_from = self._cursor.buffer, struct.Struct("<Q").unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack_from(buffer, position)
                position += 8 + length
                strings.append(buffer[position - length : position].decode())
        except UnicodeDecodeError as error:
            beginning = bytes(error.object[:40])
            self._cursor.fail(f"string {len(strings)} of key {shown(key)} is not valid UTF-8: {beginning!r}")
        return strings


def _skip_value(cursor: Cursor, key: str, offset: int) -> Field:
    what = f"the value of key {shown(key)}"
    kind = _value_type(cursor, f"the type of key {shown(key)}")
    count = None
    if kind is GGUFValueType.ARRAY:
        kind = _value_type(cursor, f"the element type of key {shown(key)}")
        if kind is GGUFValueType.ARRAY:
            cursor.fail(f"key {shown(key)} is an array of arrays, which no GGUF model uses; only flat arrays are read")
        item_bytes = 8 if kind is GGUFValueType.STRING else _DTYPES[kind].itemsize
        count = cursor.count(f"the array length of key {shown(key)}", MAX_ARRAY_ITEMS, item_bytes)
    start = cursor.position
    if kind is not GGUFValueType.STRING:
        cursor.take(_DTYPES[kind].itemsize * (1 if count is None else count), what)
    elif count is None:
        cursor.skip_string(what)
    else:
        cursor.skip_strings(count, what)
    return Field(offset, kind, count, start)


def _value_type(cursor: Cursor, what: str) -> GGUFValueType:
    number = cursor.uint32(what)
    try:
        return GGUFValueType(number)
    except ValueError:
        cursor.fail(f"{what} is {number}, the format knows 0 to {max(GGUFValueType)}")
