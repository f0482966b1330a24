"""The types that K and V caches are stored in, and the bytes they take. Knows nothing of layouts."""

from __future__ import annotations

KV_TYPES = {"f16": (1, 2), "q8_0": (32, 34)}
"""Elements of a block along the head, and its bytes: float16, or ggml's q8_0, 32 codes and a float16 scale."""


def kv_bytes(kv_type: str, elements: int) -> int:
    """Bytes of keys, or of values, with so many elements; whole blocks."""
    block, size = KV_TYPES[kv_type]
    return elements // block * size
