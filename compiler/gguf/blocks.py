"""NumPy reference of the block formats: from stored blocks to integer codes and scales, and to float32 values.

Owns the meaning of every bit of a block; knows nothing of files, nor of how a device lays weights out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .formats import BlockFormat

_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# E2M1 values doubled to be integers; the scale is halved in turn.
_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)

_CHUNK_ELEMENTS = 1 << 22  # bounds the temporaries of `dequantise` to some tens of MB


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Rows of a block format as integers and scales, elements in their natural order.

    One formula holds for every format, evaluated in float32 from left to right, each bracket rounded:

        w = (scale * sub_scale) * (code - offset) - (minimum * sub_minimum)

    where `scale` and `minimum` belong to the element's group of `group` elements, `sub_scale` and `sub_minimum`
    to its sub-group of `sub_group` elements. A missing sub-scale counts as 1, a missing minimum as 0.

    Attributes
    ----------
    codes
        `(rows, columns)`, uint8; int8 for Q8_0, IQ4_NL, IQ4_XS and MXFP4, whose codes are signed values already
        (IQ4 and MXFP4: looked up in the table of the format; MXFP4 values are doubled, the scale halved).
    scale
        `(rows, columns / group)`, float16 as stored; float32 powers of two for MXFP4.
    minimum
        `(rows, columns / group)` float16, or None. Subtracted: Q4_1 and Q5_1 store an addend m and get `-m` here.
    sub_scale
        `(rows, columns / sub_group)` or None. uint8 for Q2_K, Q4_K, Q5_K; int8 with the format's own bias of 32
        removed for Q3_K and IQ4_XS, and as stored for Q6_K.
    sub_minimum
        As `sub_scale`, uint8 (Q2_K, Q4_K, Q5_K) or None.
    offset
        Subtracted from every code: 8 (Q4_0), 16 (Q5_0), 4 (Q3_K), 32 (Q6_K), otherwise 0.
    group, sub_group
        Elements per scale and per sub-scale; equal when there are no sub-scales.
    """

    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None
    sub_scale: np.ndarray | None
    sub_minimum: np.ndarray | None
    offset: int
    group: int
    sub_group: int

    def values(self) -> np.ndarray:
        """The formula of the class: float32 `(rows, columns)`."""
        rows, columns = self.codes.shape
        grouped = (rows, columns // self.sub_group, self.sub_group)
        steps = self._per_sub_group(self.scale, self.sub_scale)
        values = self.codes.reshape(grouped).astype(np.float32)
        if self.offset:
            values -= np.float32(self.offset)
        with np.errstate(over="ignore", invalid="ignore"):  # scales beyond float32 give infinities, as in the file
            values *= steps[..., None]
            if self.minimum is not None:
                values -= self._per_sub_group(self.minimum, self.sub_minimum)[..., None]
        return values.reshape(rows, columns)

    def _per_sub_group(self, factor: np.ndarray, sub_factor: np.ndarray | None) -> np.ndarray:
        spread = np.repeat(factor.astype(np.float32), self.group // self.sub_group, axis=1)
        if sub_factor is None:
            return spread
        with np.errstate(invalid="ignore"):  # an infinite scale times a sub-scale of 0
            return spread * sub_factor.astype(np.float32)


class _Blocks(NamedTuple):
    """What a format's reader finds in blocks `(rows, blocks, block_bytes)`; arrays `(rows, blocks, …)`."""

    codes: np.ndarray
    scale: np.ndarray
    offset: int = 0
    minimum: np.ndarray | None = None
    sub_scale: np.ndarray | None = None
    sub_minimum: np.ndarray | None = None


def _bits(data: np.ndarray, width: int, run: int) -> np.ndarray:
    """Unsigned fields of `width` bits, in the order all formats use.

    The bytes are cut into runs of `run` bytes; a run holds the lowest fields of all its bytes first, then the
    next higher ones. `(…, n)` bytes become `(…, n * 8 / width)` fields.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = data.reshape(*data.shape[:-1], -1, 1, run)
    fields = (runs >> shifts) & np.uint8((1 << width) - 1)
    return fields.reshape(*data.shape[:-1], -1)


def _half(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view("<f2")


def _q4_0(blocks: np.ndarray) -> _Blocks:
    return _Blocks(_bits(blocks[..., 2:], 4, 16), _half(blocks[..., :2]), 8)


def _q4_1(blocks: np.ndarray) -> _Blocks:
    return _Blocks(_bits(blocks[..., 4:], 4, 16), _half(blocks[..., :2]), minimum=-_half(blocks[..., 2:4]))


def _q5_0(blocks: np.ndarray) -> _Blocks:
    codes = _bits(blocks[..., 6:], 4, 16) | _bits(blocks[..., 2:6], 1, 1) << 4
    return _Blocks(codes, _half(blocks[..., :2]), 16)


def _q5_1(blocks: np.ndarray) -> _Blocks:
    codes = _bits(blocks[..., 8:], 4, 16) | _bits(blocks[..., 4:8], 1, 1) << 4
    return _Blocks(codes, _half(blocks[..., :2]), minimum=-_half(blocks[..., 2:4]))


def _q8_0(blocks: np.ndarray) -> _Blocks:
    return _Blocks(blocks[..., 2:].view(np.int8), _half(blocks[..., :2]))


def _q2_k(blocks: np.ndarray) -> _Blocks:
    scales = blocks[..., :16]
    return _Blocks(
        _bits(blocks[..., 16:80], 2, 32),
        _half(blocks[..., 80:82]),
        minimum=_half(blocks[..., 82:84]),
        sub_scale=scales & 15,
        sub_minimum=scales >> 4,
    )


def _q3_k(blocks: np.ndarray) -> _Blocks:
    codes = _bits(blocks[..., 32:96], 2, 32) | _bits(blocks[..., :32], 1, 32) << 2
    scales = _bits(blocks[..., 96:104], 4, 8) | _bits(blocks[..., 104:108], 2, 4) << 4
    return _Blocks(codes, _half(blocks[..., 108:110]), 4, sub_scale=scales.view(np.int8) - np.int8(32))


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 six-bit scales and 8 six-bit minima that Q4_K and Q5_K keep in 12 bytes.

    The first four of each are the low six bits of bytes 0-3 and 4-7, whose top two bits complete the nibbles of
    bytes 8-11 to the last four of each.
    """
    first_scales, first_minima, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first_scales & 63, (last & 15) | (first_scales >> 6) << 4], axis=-1)
    minima = np.concatenate([first_minima & 63, (last >> 4) | (first_minima >> 6) << 4], axis=-1)
    return scales, minima


def _q4_k(blocks: np.ndarray) -> _Blocks:
    scales, minima = _k_scales(blocks[..., 4:16])
    codes = _bits(blocks[..., 16:], 4, 32)
    return _Blocks(codes, _half(blocks[..., :2]), 0, _half(blocks[..., 2:4]), scales, minima)


def _q5_k(blocks: np.ndarray) -> _Blocks:
    scales, minima = _k_scales(blocks[..., 4:16])
    codes = _bits(blocks[..., 48:], 4, 32) | _bits(blocks[..., 16:48], 1, 32) << 4
    return _Blocks(codes, _half(blocks[..., :2]), 0, _half(blocks[..., 2:4]), scales, minima)


def _q6_k(blocks: np.ndarray) -> _Blocks:
    codes = _bits(blocks[..., :128], 4, 64) | _bits(blocks[..., 128:192], 2, 32) << 4
    return _Blocks(codes, _half(blocks[..., 208:210]), 32, sub_scale=blocks[..., 192:208].view(np.int8))


def _iq4_nl(blocks: np.ndarray) -> _Blocks:
    return _Blocks(_IQ4_VALUES[_bits(blocks[..., 2:], 4, 16)], _half(blocks[..., :2]))


def _iq4_xs(blocks: np.ndarray) -> _Blocks:
    scales = _bits(blocks[..., 4:8], 4, 1) | _bits(blocks[..., 2:4], 2, 1) << 4
    codes = _IQ4_VALUES[_bits(blocks[..., 8:], 4, 16)]
    return _Blocks(codes, _half(blocks[..., :2]), sub_scale=scales.view(np.int8) - np.int8(32))


def _mxfp4(blocks: np.ndarray) -> _Blocks:
    scale = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)  # 2^(e - 127), halved
    return _Blocks(_MXFP4_VALUES[_bits(blocks[..., 1:], 4, 16)], scale)


_READERS: dict[str, Callable[[np.ndarray], _Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}

_FLOATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda data: data.view("<f4").astype(np.float32),
    "F16": lambda data: data.view("<f2").astype(np.float32),
    "BF16": lambda data: (data.view("<u2").astype(np.uint32) << 16).view(np.float32),
}

UNPACKABLE = frozenset(_READERS)
"""Names of the formats that `unpack` takes."""

DECODABLE = UNPACKABLE | frozenset(_FLOATS)
"""Names of the formats that `dequantise` takes."""


def unpack(block_format: BlockFormat, data: np.ndarray) -> Unpacked:
    """Split stored rows into integer codes and scales.

    Parameters
    ----------
    block_format
        One of `UNPACKABLE`.
    data
        `(rows, row_bytes)` uint8, as `GgufTensor.data` returns, or some of its rows.

    Raises
    ------
    ValueError
        The format has no codes, or the rows are not whole blocks.
    """
    if block_format.name not in UNPACKABLE:
        raise ValueError(f"{block_format.name} has no unpacked form")
    rows = _check_rows(block_format, data)
    found = _READERS[block_format.name](data.reshape(rows, -1, block_format.block_bytes))

    def flat(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array.reshape(rows, -1)

    sub_groups = 1 if found.sub_scale is None else found.sub_scale.shape[-1]
    return Unpacked(
        codes=found.codes.reshape(rows, -1),
        scale=found.scale.reshape(rows, -1),
        minimum=flat(found.minimum),
        sub_scale=flat(found.sub_scale),
        sub_minimum=flat(found.sub_minimum),
        offset=found.offset,
        group=block_format.block_size,
        sub_group=block_format.block_size // sub_groups,
    )


def dequantise(block_format: BlockFormat, data: np.ndarray) -> np.ndarray:
    """The values of stored rows.

    Parameters
    ----------
    block_format
        One of `DECODABLE`.
    data
        `(rows, row_bytes)` uint8.

    Returns
    -------
    float32 `(rows, columns)`, a new array.

    Raises
    ------
    ValueError
        The format is not among `DECODABLE`, or the rows are not whole blocks.
    """
    if block_format.name not in DECODABLE:
        raise ValueError(f"{block_format.name} cannot be decoded")
    rows = _check_rows(block_format, data)
    if block_format.name in _FLOATS:
        return _FLOATS[block_format.name](np.ascontiguousarray(data))
    columns = data.shape[1] // block_format.block_bytes * block_format.block_size
    values = np.empty((rows, columns), np.float32)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        values[start : start + step] = unpack(block_format, data[start : start + step]).values()
    return values


def _check_rows(block_format: BlockFormat, data: np.ndarray) -> int:
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] % block_format.block_bytes or not data.size:
        raise ValueError(
            f"{block_format.name} rows must be uint8 (rows, n * {block_format.block_bytes}), "
            f"not {data.dtype} {data.shape}"
        )
    return data.shape[0]
