"""Rows of weights in the block formats of GGUF: given values, or random ones.

Random rows of most formats are made directly as blocks (random codes, fitting scales), which needs no quantiser and
runs at the speed of the random generator; the others round real normal numbers. Knows nothing of models or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np

from dflashc.runtime.errors import RequestError

ENCODABLE = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""Formats that given values can be rounded to."""

_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True)
class _RandomBlocks:
    """Where a format keeps what must fit together; everything else in a block is random bits.

    Attributes
    ----------
    scale
        Byte at which the block's scale lies, an f16 unless `exponent`.
    unit
        Standard deviation of a value when the block's scale is 1 and all codes are uniform.
    minimum, centre
        Byte of the f16 scale of the minima, None without minima; and the code that means 0. A value is
        scale * s * code - minimum * m: with m = s and minimum = centre * scale the values are centred.
    sub_scales
        First and end byte of the sub-block scales s and minima m.
    either_sign
        Half of the scales are negative, since the codes' mean is not 0 and nothing else makes up for it.
    exponent
        The scale is a power of two, stored as one byte: its exponent + 128.
    """

    scale: int
    unit: float
    minimum: int | None = None
    centre: float = 0.0
    sub_scales: tuple[int, int] = (0, 0)
    either_sign: bool = False
    exponent: bool = False


def _uniform_square(low: int, high: int) -> float:
    """Mean square of the integers low..high."""
    return float(np.mean(np.arange(low, high + 1, dtype=np.float64) ** 2))


def _unit(scale_square: float, codes: int) -> float:
    return float(np.sqrt(scale_square * (codes**2 - 1) / 12))


_SIGNED_6_BIT = _uniform_square(-32, 31)
_IQ4_SQUARE, _MXFP4_SQUARE = (
    float(np.mean(np.array(codes.kvalues, np.float64) ** 2)) for codes in (gguf.quants.IQ4_NL, gguf.quants.MXFP4)
)
_RANDOM_BLOCKS = {
    "Q2_K": _RandomBlocks(80, _unit(_uniform_square(0, 15), 4), 82, 1.5, (0, 16)),
    "Q3_K": _RandomBlocks(108, float(np.sqrt(_SIGNED_6_BIT * _uniform_square(-4, 3)))),
    "Q4_K": _RandomBlocks(0, _unit(_uniform_square(0, 63), 16), 2, 7.5, (4, 16)),
    "Q5_K": _RandomBlocks(0, _unit(_uniform_square(0, 63), 32), 2, 15.5, (4, 16)),
    "Q6_K": _RandomBlocks(208, float(np.sqrt(_uniform_square(-128, 127) * _SIGNED_6_BIT))),
    "IQ4_NL": _RandomBlocks(0, float(np.sqrt(_IQ4_SQUARE)), either_sign=True),
    "IQ4_XS": _RandomBlocks(0, float(np.sqrt(_SIGNED_6_BIT * _IQ4_SQUARE))),
    "MXFP4": _RandomBlocks(0, float(np.sqrt(_MXFP4_SQUARE)), exponent=True),
}

FORMATS = (*ENCODABLE, *reversed(_RANDOM_BLOCKS))
"""Formats that random rows can have."""


def row_bytes(columns: int, block_format: str) -> int:
    """Bytes of a row.

    Raises
    ------
    RequestError
        The format is not among `FORMATS`, or a row is no whole number of its blocks.
    """
    if block_format not in FORMATS:
        raise RequestError(f"format {block_format!r} cannot be generated; choose one of {' '.join(FORMATS)}")
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_format]]
    if columns % size:
        raise RequestError(f"rows of {columns} values are not whole blocks of {size} for {block_format}")
    return columns // size * nbytes


def encode(values: np.ndarray, block_format: str) -> np.ndarray:
    """Round values (rows, columns) to a format of `ENCODABLE`; the result is (rows, row bytes) uint8."""
    if block_format not in ENCODABLE:
        raise RequestError(f"given values cannot be stored as {block_format}; choose one of {' '.join(ENCODABLE)}")
    width = row_bytes(values.shape[1], block_format)
    values = np.ascontiguousarray(values, np.float32)
    return gguf.quantize(values, gguf.GGMLQuantizationType[block_format]).view(np.uint8).reshape(-1, width)


def random_rows(
    generator: np.random.Generator, rows: int, columns: int, block_format: str, deviation: float
) -> np.ndarray:
    """Random weights around 0 with the given standard deviation, as (rows, row bytes) uint8.

    Beyond its result the function holds some ten megabytes, whatever the size.
    """
    result = np.empty((rows, row_bytes(columns, block_format)), np.uint8)
    step = max(1, _CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        chunk = result[start : start + step]
        if block_format in _RANDOM_BLOCKS:
            chunk[:] = _random_blocks(generator, chunk.size, block_format, deviation).reshape(chunk.shape)
        else:
            values = generator.standard_normal((len(chunk), columns), np.float32)
            chunk[:] = encode(values * np.float32(deviation), block_format)
    return result


def _random_blocks(generator: np.random.Generator, nbytes: int, block_format: str, deviation: float) -> np.ndarray:
    layout = _RANDOM_BLOCKS[block_format]
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_format]][1]
    if deviation == 0:
        return np.zeros((nbytes // block_bytes, block_bytes), np.uint8)
    blocks = np.frombuffer(generator.bytes(nbytes), np.uint8).reshape(-1, block_bytes).copy()
    if layout.exponent:
        blocks[:, layout.scale] = _exponents(generator, len(blocks), deviation / layout.unit)
        return blocks
    # Scales differ by block; 13/12 is the mean square of a uniform number in 0.5..1.5.
    scale = generator.uniform(0.5, 1.5, (len(blocks), 1)) * deviation / layout.unit / np.sqrt(13 / 12)
    if layout.either_sign:
        scale *= generator.choice([-1, 1], scale.shape)
    blocks[:, layout.scale : layout.scale + 2] = scale.astype("<f2").view(np.uint8)
    if layout.minimum is not None:
        blocks[:, layout.minimum : layout.minimum + 2] = (scale * layout.centre).astype("<f2").view(np.uint8)
        _equal_minima(blocks[:, slice(*layout.sub_scales)])
    return blocks


def _exponents(generator: np.random.Generator, count: int, scale: float) -> np.ndarray:
    """Bytes e for scales 2**(e - 128), of two neighbouring powers with `scale` > 0 as their root mean square."""
    lower = np.floor(np.log2(scale))
    share = ((scale / 2**lower) ** 2 - 1) / 3
    return (lower + 128 + (generator.random(count) < share)).astype(np.uint8)


def _equal_minima(packed: np.ndarray) -> None:
    """Set the minimum of every sub-block to its scale.

    16 bytes (Q2_K) hold a scale in the low and a minimum in the high nibble. 12 bytes (Q4_K, Q5_K) hold four scales
    and four minima of 6 bits, whose upper bits complete the four nibble pairs that follow.
    """
    if packed.shape[1] == 12:
        packed[:, 4:8] = packed[:, 0:4]
        packed = packed[:, 8:12]
    packed[:] = packed & 0x0F | packed << 4
