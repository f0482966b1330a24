"""Writes GGUF files byte by byte, also wrong ones, which no writer of a library would produce."""

from __future__ import annotations

import struct
from collections.abc import Sequence

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
F32, F16, Q4_0, Q8_0, I64 = 0, 1, 2, 8, 27


def uint32(value: int) -> bytes:
    return struct.pack("<I", value)


def uint64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return uint64(len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + uint32(kind) + value


def array(key: str, kind: int, count: int, items: bytes) -> bytes:
    return entry(key, ARRAY, uint32(kind) + uint64(count) + items)


def tensor(name: str | bytes, dims: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    return string(name) + uint32(len(dims)) + b"".join(map(uint64, dims)) + uint32(kind) + uint64(offset)


def header(n_tensors: int, n_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + uint32(version) + uint64(n_tensors) + uint64(n_keys)


def gguf_file(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    head = header(len(tensors), len(entries), version) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
