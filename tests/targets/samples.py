"""Random weights in every GGUF type, and activations quantised by their formula, for tests of kernels."""

from collections.abc import Sequence

import gguf
import numpy as np

from dflashc.targets.gguf_blocks import BLOCK_TYPES

TYPE_NAMES = list(BLOCK_TYPES)

_SCALE_OFFSETS = {  # where ggml's block structures hold float16 scales, in bytes (ggml-common.h)
    "Q8_0": [0], "Q5_0": [0], "Q5_1": [0, 2], "Q4_0": [0], "Q4_1": [0, 2], "Q6_K": [208], "Q5_K": [0, 2],
    "Q4_K": [0, 2], "Q3_K": [108], "Q2_K": [80, 82], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}


def random_blocks(type_name: str, rows: int, columns: int, rng: np.random.Generator,
                  byte: int | None = None) -> np.ndarray:
    """Rows of random blocks, uint8 (rows, row_bytes); `byte` fills all but the scales instead."""
    kind = getattr(gguf.GGMLQuantizationType, type_name)
    if type_name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    if byte is not None:
        blocks[:] = byte
    for offset in _SCALE_OFFSETS[type_name]:
        scales = rng.uniform(-0.01, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = rng.integers(110, 125, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def dequantise(type_name: str, blocks: np.ndarray) -> np.ndarray:
    """The gguf package's values, float32 (rows, columns)."""
    kind = getattr(gguf.GGMLQuantizationType, type_name)
    return gguf.quants.dequantize(blocks, kind).reshape(len(blocks), -1).astype(np.float32)


_GROUPS = {"q8_32": (32, 32, np.int32), "q8_256": (256, 16, np.int16), "q8_32s": (32, 16, np.int32)}


def quantise(values: np.ndarray, form: str) -> list[np.ndarray]:
    """The buffers of `form` for float32 (M, K): scale = max|x| / 127, code = round_half_even(x * (127 / max|x|))."""
    if form == "f32":
        return [values]
    group, sum_group, sum_dtype = _GROUPS[form]
    grouped = values.reshape(len(values), -1, group)
    largest = np.abs(grouped).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(grouped * inverse).astype(np.int8).reshape(values.shape)
    sums = codes.reshape(len(values), -1, sum_group).sum(axis=-1, dtype=sum_dtype)
    return [codes, (largest / np.float32(127))[..., 0], sums]


def values_of(buffers: list[np.ndarray], form: str) -> np.ndarray:
    """What the buffers of `form` stand for, float64 (M, K)."""
    if form == "f32":
        return buffers[0].astype(np.float64)
    codes, scale = buffers[:2]
    return codes * np.repeat(scale.astype(np.float64), _GROUPS[form][0], axis=1)


def empty_form(form: str, rows: int, columns: int) -> list[np.ndarray]:
    """Zeroed buffers of `form`."""
    return [np.zeros_like(b) for b in quantise(np.zeros((rows, columns), np.float32), form)]


def assert_stands_for(buffers: list[np.ndarray], form: str, expected: np.ndarray) -> None:
    """The buffers of `form` are the quantisation of values close to `expected` float64 (M, N)."""
    if form == "f32":
        np.testing.assert_allclose(buffers[0], expected, atol=4e-6 * np.abs(expected).max(), rtol=0)
        return
    assert_nearly_same_codes(buffers, quantise(expected.astype(np.float32), form))


def assert_nearly_same_codes(buffers: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> None:
    """Codes, scales and sums equal others, but that a value next to a rounding boundary may fall on its other side."""
    codes, scale, sums = buffers
    np.testing.assert_allclose(scale, reference[1], rtol=1e-4)
    assert np.abs(codes.astype(int) - reference[0]).max() <= 1
    assert (codes != reference[0]).sum() <= 1 + codes.size // 100
    np.testing.assert_array_equal(sums, codes.reshape(*sums.shape, -1).sum(axis=-1))
