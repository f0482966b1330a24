"""Block formats against `gguf.quants`: bit for bit, on random blocks with finite scales."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from dflashc.compiler.gguf import BLOCK_FORMATS, DECODABLE, UNPACKABLE, dequantise, unpack

ROWS, BLOCKS = 5, 3

# Where a block holds float16 scales, which random bytes would make infinite or NaN.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}

# Codes: lowest and highest value the format can hold; offset; elements per sub-group; range of the sub-scales.
EXPECTED = {
    "Q4_0": (np.uint8, 0, 15, 8, 32, None),
    "Q4_1": (np.uint8, 0, 15, 0, 32, None),
    "Q5_0": (np.uint8, 0, 31, 16, 32, None),
    "Q5_1": (np.uint8, 0, 31, 0, 32, None),
    "Q8_0": (np.int8, -128, 127, 0, 32, None),
    "Q2_K": (np.uint8, 0, 3, 0, 16, (np.uint8, 0, 15)),
    "Q3_K": (np.uint8, 0, 7, 4, 16, (np.int8, -32, 31)),
    "Q4_K": (np.uint8, 0, 15, 0, 32, (np.uint8, 0, 63)),
    "Q5_K": (np.uint8, 0, 31, 0, 32, (np.uint8, 0, 63)),
    "Q6_K": (np.uint8, 0, 63, 32, 16, (np.int8, -128, 127)),
    "IQ4_NL": (np.int8, -127, 113, 0, 32, None),
    "IQ4_XS": (np.int8, -127, 113, 0, 32, (np.int8, -32, 31)),
    "MXFP4": (np.int8, -12, 12, 0, 32, None),
}

SPECIAL_HALVES = np.array([0.0, -0.0, 6e-8, -6e-5, 1.0, 65504.0, -65504.0], np.float16)


def random_blocks(name: str, rows: int = ROWS, blocks: int = BLOCKS) -> np.ndarray:
    """`(rows, row_bytes)` uint8: random bits, finite scales that include zeros, subnormals and the largest values."""
    generator = np.random.default_rng(sorted(HALVES).index(name))
    data = generator.integers(0, 256, (rows, blocks, BLOCK_FORMATS[name].block_bytes), np.uint8)
    for position in HALVES[name]:
        scales = generator.standard_normal((rows, blocks)).astype(np.float16)
        special = generator.random((rows, blocks)) < 0.3
        scales[special] = generator.choice(SPECIAL_HALVES, special.sum())
        data[..., position : position + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def reference(name: str, data: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_every_format_is_covered() -> None:
    assert set(HALVES) == set(EXPECTED) == UNPACKABLE
    assert {"F32", "F16", "BF16"} == DECODABLE - UNPACKABLE


@pytest.mark.parametrize("name", HALVES)
def test_dequantise_equals_the_gguf_package(name: str) -> None:
    data = random_blocks(name)
    found = dequantise(BLOCK_FORMATS[name], data)
    assert found.shape == (ROWS, BLOCKS * BLOCK_FORMATS[name].block_size)
    assert_same_bits(found, reference(name, data))


@pytest.mark.parametrize("name", HALVES)
def test_documented_formula_gives_the_values(name: str) -> None:
    """`(scale * sub_scale) * (code - offset) - (minimum * sub_minimum)`, written out with one factor per element."""
    data = random_blocks(name)
    parts = unpack(BLOCK_FORMATS[name], data)

    def spread(factors: np.ndarray | None, elements: int, missing: float) -> np.ndarray:
        if factors is None:
            return np.full(parts.codes.shape, missing, np.float32)
        return np.repeat(factors, elements, axis=1).astype(np.float32)

    step = spread(parts.scale, parts.group, 1) * spread(parts.sub_scale, parts.sub_group, 1)
    with np.errstate(over="ignore"):
        values = step * (parts.codes.astype(np.float32) - np.float32(parts.offset))
    values -= spread(parts.minimum, parts.group, 0) * spread(parts.sub_minimum, parts.sub_group, 1)
    assert_same_bits(values, reference(name, data))


@pytest.mark.parametrize("name", HALVES)
def test_unpacked_shapes_types_and_ranges(name: str) -> None:
    block_format = BLOCK_FORMATS[name]
    parts = unpack(block_format, random_blocks(name, 16, 16))
    code_type, lowest, highest, offset, sub_group, sub_scales = EXPECTED[name]
    columns = 16 * block_format.block_size
    assert parts.codes.shape == (16, columns)
    assert (parts.codes.dtype, parts.codes.min(), parts.codes.max()) == (code_type, lowest, highest)
    assert (parts.offset, parts.group, parts.sub_group) == (offset, block_format.block_size, sub_group)
    assert parts.scale.shape == (16, columns // parts.group)
    assert parts.scale.dtype == (np.float32 if name == "MXFP4" else np.float16)
    if sub_scales is None:
        assert parts.sub_scale is None
    else:
        scale_type, smallest, largest = sub_scales
        assert parts.sub_scale is not None
        assert parts.sub_scale.shape == (16, columns // sub_group)
        assert parts.sub_scale.dtype == scale_type
        assert (parts.sub_scale.min(), parts.sub_scale.max()) == (smallest, largest)
    assert (parts.minimum is not None) == (name in {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"})
    assert (parts.sub_minimum is not None) == (name in {"Q2_K", "Q4_K", "Q5_K"})
    if parts.sub_minimum is not None:
        assert parts.sub_scale is not None
        assert parts.sub_minimum.dtype == np.uint8
        assert parts.sub_minimum.shape == parts.sub_scale.shape


def test_minimum_of_q4_1_is_the_negated_addend() -> None:
    block = np.zeros((1, 20), np.uint8)
    block[0, :4] = np.array([2.0, 3.0], np.float16).view(np.uint8)
    block[0, 4] = 0x21
    parts = unpack(BLOCK_FORMATS["Q4_1"], block)
    assert parts.minimum == np.float16(-3)
    assert parts.values()[0, [0, 16, 1]].tolist() == [5.0, 7.0, 3.0]


def test_mxfp4_values_by_hand() -> None:
    """E2M1 codes 1 (0.5) and 15 (-6) under an exponent of 2^3."""
    block = np.zeros((1, 17), np.uint8)
    block[0, :2] = [127 + 3, 0xF1]
    assert dequantise(BLOCK_FORMATS["MXFP4"], block)[0, [0, 16, 1]].tolist() == [4.0, -48.0, 0.0]


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254, 255])
def test_mxfp4_at_the_ends_of_the_exponent(exponent: int) -> None:
    block = np.full((1, 17), exponent, np.uint8)
    assert_same_bits(dequantise(BLOCK_FORMATS["MXFP4"], block), reference("MXFP4", block))


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_floats(name: str, dtype: type) -> None:
    values: np.ndarray = np.array([[0, -0.0, 1.5, -6e-8], [np.inf, -np.inf, 65504, 2]], dtype)
    assert_same_bits(dequantise(BLOCK_FORMATS[name], values.view(np.uint8)), values.astype(np.float32))


def test_bfloat16() -> None:
    bits = np.arange(0, 0x7F80, 7, dtype=np.uint16).reshape(1, -1)
    expected = np.concatenate([np.zeros_like(bits[..., None]), bits[..., None]], axis=-1).view("<f4")[..., 0]
    assert_same_bits(dequantise(BLOCK_FORMATS["BF16"], bits.view(np.uint8)), expected)


def test_many_rows_are_decoded_in_pieces() -> None:
    data = np.tile(random_blocks("Q4_K", 1, 64), (300, 1))
    assert_same_bits(dequantise(BLOCK_FORMATS["Q4_K"], data), np.tile(reference("Q4_K", data[:1]), (300, 1)))


@pytest.mark.parametrize(
    "data",
    [np.zeros((2, 35), np.uint8), np.zeros((0, 34), np.uint8), np.zeros(34, np.uint8), np.zeros((1, 34), np.int8)],
)
def test_rows_must_be_whole_blocks(data: np.ndarray) -> None:
    for decode in (unpack, dequantise):
        with pytest.raises(ValueError, match="Q8_0 rows must be uint8"):
            decode(BLOCK_FORMATS["Q8_0"], data)


def test_formats_without_codes_or_decoder() -> None:
    with pytest.raises(ValueError, match="F16 has no unpacked form"):
        unpack(BLOCK_FORMATS["F16"], np.zeros((1, 2), np.uint8))
    with pytest.raises(ValueError, match="IQ1_S cannot be decoded"):
        dequantise(BLOCK_FORMATS["IQ1_S"], np.zeros((1, 50), np.uint8))
