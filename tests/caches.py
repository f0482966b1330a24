"""K and V caches as tests see them: bytes by slot, and numbers.

Written from the layouts that `kv_f16` and `kv_q8_0` of `targets.cpu.kernels` and of `targets.gpu.kernels` state; q8_0
itself is the gguf package's.
"""

from __future__ import annotations

import gguf
import numpy as np

from dflashc.runtime.kv_types import kv_bytes

TILE, BLOCK = 64, 32
KEYS = 32  # that lie side by side on a GPU
GPU = 0
"""In place of a CPU's lanes."""


def by_slot(memory: np.ndarray, kv: str, which: str, size: int, lanes: int) -> np.ndarray:
    """A cache's bytes as (heads, tokens, bytes of one key or value): codes before scales, a key's in order.

    Parameters
    ----------
    memory : uint8 (heads, bytes of a head)
    which : "k" or "v"
    lanes : int
        Of the CPU, or `GPU`.
    """
    heads = len(memory)
    if lanes == GPU:
        return _by_slot_of_gpu(memory, kv, which, size)
    if kv == "f16":
        if which == "v":
            return memory.reshape(heads, -1, 2 * size)
        return memory.reshape(heads, -1, size, lanes, 2).transpose(0, 1, 3, 2, 4).reshape(heads, -1, 2 * size)
    tiles = memory.reshape(heads, -1, TILE * kv_bytes(kv, size))
    codes, scales = tiles[..., : TILE * size], tiles[..., TILE * size :]
    if which == "k":
        codes = codes.reshape(heads, -1, TILE // lanes, size // 4, lanes, 4).transpose(0, 1, 2, 4, 3, 5)
    scales = scales.reshape(heads, -1, size // BLOCK, TILE, 2).transpose(0, 1, 3, 2, 4)
    return np.concatenate([codes.reshape(heads, -1, size), scales.reshape(heads, -1, size // BLOCK * 2)], axis=-1)


def _by_slot_of_gpu(memory: np.ndarray, kv: str, which: str, size: int) -> np.ndarray:
    heads, tokens = len(memory), memory.shape[1] // kv_bytes(kv, size)
    shares = [size, kv_bytes(kv, size) - size] if kv == "q8_0" else [2 * size]  # bytes of a token, codes before scales
    found = []
    for share, start in zip(shares, (0, tokens * size), strict=False):
        part = memory[:, start : start + tokens * share]
        if which == "k":
            part = part.reshape(heads, tokens // KEYS, share // 4, KEYS, 4).transpose(0, 1, 3, 2, 4)
        found.append(part.reshape(heads, tokens, share))
    return np.concatenate(found, axis=-1)


def in_memory(slots: np.ndarray, kv: str, which: str, size: int, lanes: int) -> np.ndarray:
    """The inverse of `by_slot`: uint8 (heads, bytes of a head)."""
    count = slots[0].size
    places = np.arange(count).reshape(1, count)
    order = np.stack([by_slot((places >> shift & 255).astype(np.uint8), kv, which, size, lanes).reshape(-1)
                      for shift in range(0, 32, 8)], axis=-1).view(np.uint32).reshape(-1)
    memory = np.empty((len(slots), count), np.uint8)
    memory[:, order] = slots.reshape(len(slots), -1)
    return memory


def encode(values: np.ndarray, kv: str, which: str, lanes: int) -> np.ndarray:
    """What a cache stores for float32 (..., D), bytes (..., bytes); NaN stays NaN."""
    if kv == "f16":
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8)
    known = np.where(np.isnan(values), np.float32(0), values).reshape(-1, BLOCK)
    blocks = gguf.quants.quantize(known, gguf.GGMLQuantizationType.Q8_0)
    codes, scales = blocks[:, 2:], blocks[:, :2].copy()
    scales.view(np.float16)[np.isnan(values).reshape(-1, BLOCK).any(axis=-1)] = np.nan
    if which == "k" and lanes != GPU:
        codes = codes + np.uint8(128)
    *shape, size = values.shape
    return np.concatenate([codes.reshape(values.shape), scales.reshape(*shape, size // BLOCK * 2)], axis=-1)


def decode(stored: np.ndarray, kv: str, which: str, lanes: int) -> np.ndarray:
    """The float64 values (..., D) of stored bytes."""
    if kv == "f16":
        return np.ascontiguousarray(stored).view(np.float16).astype(np.float64)
    size = stored.shape[-1] * BLOCK // (BLOCK + 2)
    codes = np.ascontiguousarray(stored[..., :size])
    if which == "k" and lanes != GPU:
        codes = codes - np.uint8(128)
    scales = np.ascontiguousarray(stored[..., size:]).view(np.float16).astype(np.float64)
    return codes.view(np.int8) * np.repeat(scales, BLOCK, axis=-1)
