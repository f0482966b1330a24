"""GGUF blocks to the layout of the CPU's matmuls: output rows interleaved, one lane each.

L rows (the lanes of the feature level) form a row group, stored as [quant plane | header plane], padded to 64 bytes.
Along K the quant plane consists of blocks of 32 codes. A block is cut into quads, 4 consecutive codes of one row, and
a quad takes 4 bytes of each row's lane: one vector load gives the same quad of L rows. Codes of 3 to 6 bits are split
into planes of 4, 2 and 1 bits. Knows nothing of files or models; see `PackedFormat` for the headers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflashc.runtime.errors import BuildError

ALIGNMENT = 64
BLOCK = 32
"""Codes of a block of the quant plane."""
QUAD = 4
"""Consecutive codes of one row that share a 32-bit lane."""
_CHUNK_CODES = 1 << 19  # codes that are repacked at once, so that temporaries stay in the cache


@dataclass(frozen=True)
class PackedFormat:
    """A format of packed weights, and so of matmul kernels.

    Headers, per row group and header group along K (L rows each): families
     - "block": scale[L], then minimum[L] where `minimum`, all of `scale_dtype`;
     - "super": for each block two bytes per row, then float16 scale[L], then float16 minimum scale[L] where `minimum`.
       The two bytes are the int8 scales of both halves of the block (q3_k, q6_k), scale | minimum << 4 of both halves
       (q2_k), or scale and minimum of the whole block (q4_k, q5_k);
     - "float": none; the quant plane holds the values as [k][L].

    Attributes
    ----------
    form : str
        The activation form that its matmuls read.
    bits : int
        Bits of a code or value.
    group : int
        Elements of K that share a header; K must be a multiple of it and of 32.
    offset : int
        Subtracted from a code: weight = scale * (code - offset), or scale * code - minimum.
    """

    name: str
    family: str
    form: str
    bits: int
    group: int
    offset: int = 0
    minimum: bool = False
    scale_dtype: str = "float16"

    @property
    def header_bytes(self) -> int:
        """Header bytes per row and header group."""
        if self.family == "float":
            return 0
        scales = (1 + self.minimum) * np.dtype(self.scale_dtype).itemsize
        return scales + (2 * self.group // BLOCK if self.family == "super" else 0)

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the planes a code is split into, low bits first."""
        return {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}[self.bits]

    def quant_bytes(self, columns: int, lanes: int) -> int:
        """Bytes of a row group's quant plane."""
        return columns * self.bits // 8 * lanes

    def group_bytes(self, columns: int, lanes: int) -> int:
        """Bytes from one row group to the next."""
        used = self.quant_bytes(columns, lanes) + columns // self.group * self.header_bytes * lanes
        return -(-used // ALIGNMENT) * ALIGNMENT

    def packed_bytes(self, rows: int, columns: int, lanes: int) -> int:
        """Bytes of a packed matrix of (rows, columns)."""
        return -(-rows // lanes) * self.group_bytes(columns, lanes)


PACKED_FORMATS: dict[str, PackedFormat] = {f.name: f for f in (
    PackedFormat("q8_0", "block", "q8_32", 8, 32, offset=128),
    PackedFormat("q8_0_f32", "block", "q8_32", 8, 32, offset=128, scale_dtype="float32"),
    PackedFormat("q5_0", "block", "q8_32", 5, 32, offset=16),
    PackedFormat("q5_1", "block", "q8_32", 5, 32, minimum=True),
    PackedFormat("q4_0", "block", "q8_32", 4, 32, offset=8),
    PackedFormat("q4_1", "block", "q8_32", 4, 32, minimum=True),
    PackedFormat("q6_k", "super", "q8_256", 6, 256, offset=32),
    PackedFormat("q5_k", "super", "q8_256", 5, 256, minimum=True),
    PackedFormat("q4_k", "super", "q8_256", 4, 256, minimum=True),
    PackedFormat("q3_k", "super", "q8_256", 3, 256, offset=4),
    PackedFormat("q2_k", "super", "q8_256", 2, 256, minimum=True),
    PackedFormat("f32", "float", "f32", 32, 32),
    PackedFormat("f16", "float", "f32", 16, 32),
    PackedFormat("bf16", "float", "f32", 16, 32),
)}


@dataclass(frozen=True)
class Choice:
    """The packed format that stands for a GGUF type; `substitution` tells the user where it is wider than the file's."""

    format: PackedFormat
    substitution: str = ""


@dataclass(frozen=True)
class _Parts:
    """A piece of a matrix, taken apart: codes (R, K) uint8 with their offset, or values; the header's fields in order.

    Each header field is (R, groups, n) with n bytes or floats per row and group.
    """

    codes: np.ndarray
    header: tuple[np.ndarray, ...]


def _halves(bytes_: np.ndarray) -> np.ndarray:
    """Little-endian float16 scales out of bytes (…, 2)."""
    return np.ascontiguousarray(bytes_).view("<f2")


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes to (…, 2 n) codes: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bit(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes to (…, 8 n) bits, least significant first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _q8_0(b: np.ndarray) -> _Parts:
    return _Parts(b[..., 2:] ^ 0x80, (_halves(b[..., :2]),))


def _q4_0(b: np.ndarray) -> _Parts:
    return _Parts(_nibbles(b[..., 2:]), (_halves(b[..., :2]),))


def _q4_1(b: np.ndarray) -> _Parts:
    return _Parts(_nibbles(b[..., 4:]), (_halves(b[..., :2]), _halves(b[..., 2:4])))


def _q5_0(b: np.ndarray) -> _Parts:
    return _Parts(_nibbles(b[..., 6:]) | _bit(b[..., 2:6]) << 4, (_halves(b[..., :2]),))


def _q5_1(b: np.ndarray) -> _Parts:
    return _Parts(_nibbles(b[..., 8:]) | _bit(b[..., 4:8]) << 4, (_halves(b[..., :2]), _halves(b[..., 2:4])))


def _k_scales(packed: np.ndarray) -> np.ndarray:
    """The 6-bit scales and minima of Q4_K and Q5_K: bytes (…, 12) to (…, 16), scale and minimum in turn."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minimum = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return np.stack([scale, minimum], axis=-1).reshape(*packed.shape[:-1], 16)


def _q4_k(b: np.ndarray) -> _Parts:
    quants = _nibbles(b[..., 16:].reshape(*b.shape[:-1], 4, 32))
    return _Parts(quants, (_k_scales(b[..., 4:16]), _halves(b[..., 0:2]), _halves(b[..., 2:4])))


def _q5_k(b: np.ndarray) -> _Parts:
    quants = _nibbles(b[..., 48:].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    high = b[..., 16:48, None].swapaxes(-1, -2) >> np.arange(8, dtype=np.uint8)[:, None]
    return _Parts(quants | (high & 1) << 4, (_k_scales(b[..., 4:16]), _halves(b[..., 0:2]), _halves(b[..., 2:4])))


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes to (…, 4, n) codes, least significant first."""
    return packed[..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3


def _q6_k(b: np.ndarray) -> _Parts:
    low = _nibbles(b[..., :128].reshape(*b.shape[:-1], 2, 64)).reshape(*b.shape[:-1], 2, 4, 32)
    high = _two_bits(b[..., 128:192].reshape(*b.shape[:-1], 2, 32))
    return _Parts(low | high << 4, (b[..., 192:208], _halves(b[..., 208:210])))


def _q3_k(b: np.ndarray) -> _Parts:
    low = _two_bits(b[..., 32:96].reshape(*b.shape[:-1], 2, 32))
    high = b[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    packed = b[..., 96:108]
    six = _nibbles(packed[..., :8]) | _two_bits(packed[..., 8:12]).reshape(*b.shape[:-1], 16) << 4
    return _Parts(low.reshape(*b.shape[:-1], 8, 32) | high << 2, (six - np.uint8(32), _halves(b[..., 108:110])))


def _q2_k(b: np.ndarray) -> _Parts:
    codes = _two_bits(b[..., 16:80].reshape(*b.shape[:-1], 2, 32))
    return _Parts(codes, (b[..., :16], _halves(b[..., 80:82]), _halves(b[..., 82:84])))


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # twice the value of E2M1


def _look_up(values: np.ndarray, packed: np.ndarray) -> np.ndarray:
    return (values + 128).astype(np.uint8)[_nibbles(packed)]


def _iq4_nl(b: np.ndarray) -> _Parts:
    return _Parts(_look_up(_IQ4_VALUES, b[..., 2:]), (_halves(b[..., :2]),))


def _iq4_xs(b: np.ndarray) -> _Parts:
    high = np.ascontiguousarray(b[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*b.shape[:-1], 8)
    scale = _halves(b[..., 0:2]).astype(np.float32) * (low + (high << 4).astype(np.float32) - 32)
    codes = _look_up(_IQ4_VALUES, b[..., 8:].reshape(*b.shape[:-1], 8, 16))
    return _Parts(codes, (scale.astype(np.float32).reshape(b.shape[0], -1, 1),))


def _mxfp4(b: np.ndarray) -> _Parts:
    # the exponent byte means 2**(e - 127); the values are doubled, so 2**(e - 128), exact down to float32's denormals
    scale = np.ldexp(np.float32(1), b[..., :1].astype(np.int32) - 128)
    return _Parts(_look_up(_MXFP4_VALUES, b[..., 1:]), (scale.astype(np.float32),))


def _values(dtype: str) -> Callable[[np.ndarray], _Parts]:
    return lambda b: _Parts(np.ascontiguousarray(b).view(dtype), ())


@dataclass(frozen=True)
class _Source:
    """A GGUF type: its blocks, the packed format that takes it, how to take a block apart."""

    elements: int
    block_bytes: int
    format: str
    take_apart: Callable[[np.ndarray], _Parts]
    substitution: str = ""


_SOURCES: dict[str, _Source] = {
    "Q8_0": _Source(32, 34, "q8_0", _q8_0),
    "Q5_0": _Source(32, 22, "q5_0", _q5_0),
    "Q5_1": _Source(32, 24, "q5_1", _q5_1),
    "Q4_0": _Source(32, 18, "q4_0", _q4_0),
    "Q4_1": _Source(32, 20, "q4_1", _q4_1),
    "Q6_K": _Source(256, 210, "q6_k", _q6_k),
    "Q5_K": _Source(256, 176, "q5_k", _q5_k),
    "Q4_K": _Source(256, 144, "q4_k", _q4_k),
    "Q3_K": _Source(256, 110, "q3_k", _q3_k),
    "Q2_K": _Source(256, 84, "q2_k", _q2_k),
    "IQ4_NL": _Source(32, 18, "q8_0", _iq4_nl, "IQ4_NL is stored as 8-bit codes: exact, 1.9x the bytes"),
    "IQ4_XS": _Source(256, 136, "q8_0_f32", _iq4_xs,
                      "IQ4_XS is stored as 8-bit codes with float32 scales: exact, 2.1x the bytes"),
    "MXFP4": _Source(32, 17, "q8_0_f32", _mxfp4,
                     "MXFP4 is stored as 8-bit codes with float32 scales: exact, 2.1x the bytes"),
    "F32": _Source(1, 4, "f32", _values("<u4")),
    "F16": _Source(1, 2, "f16", _values("<u2")),
    "BF16": _Source(1, 2, "bf16", _values("<u2")),
}


def packed_format(type_name: str) -> Choice:
    """The packed format for a GGUF type such as "Q4_K". Raises `BuildError` for a type without one."""
    source = _SOURCES.get(type_name)
    if source is None:
        raise BuildError(f"the CPU target has no kernel for {type_name} weights; convert the model to one of "
                         f"{', '.join(sorted(_SOURCES))}")
    return Choice(PACKED_FORMATS[source.format], source.substitution)


def pack_rows(type_name: str, data: np.ndarray, columns: int, lanes: int) -> np.ndarray:
    """Repack consecutive rows of a matrix.

    Parameters
    ----------
    type_name : str
        GGUF type of the rows.
    data : uint8, (rows, row_bytes)
        The rows' blocks. A large matrix can be packed in pieces, each but the last a multiple of `lanes` rows.
    columns : int
        Elements of a row (K).
    lanes : int
        Rows of a row group.

    Returns
    -------
    uint8, (packed_bytes,)
        Missing rows of the last group have zero scales.

    Raises
    ------
    BuildError
        K is no multiple of the format's group, or the rows have another size than K elements need.
    """
    layout = packed_format(type_name).format
    source = _SOURCES[type_name]
    if columns <= 0 or columns % max(layout.group, source.elements):
        raise BuildError(f"a {type_name} matrix has {columns} columns; the CPU target needs a multiple of "
                         f"{max(layout.group, source.elements)}")
    blocks = columns // source.elements
    if data.ndim != 2 or data.dtype != np.uint8 or data.shape[1] != blocks * source.block_bytes:
        raise BuildError(f"{type_name} rows of {data.shape[-1]} bytes found, {blocks * source.block_bytes} expected "
                         f"for {columns} columns")
    rows = data.shape[0]
    groups = -(-rows // lanes)
    stride = layout.group_bytes(columns, lanes)
    packed = np.zeros((groups, stride), np.uint8)
    step = max(1, _CHUNK_CODES // (columns * lanes))
    for first in range(0, groups, step):
        piece = data[first * lanes : (first + step) * lanes]
        if len(piece) % lanes:
            padded = np.zeros((-(-len(piece) // lanes) * lanes, data.shape[1]), np.uint8)
            padded[: len(piece)] = piece
            piece = padded
        parts = source.take_apart(piece.reshape(len(piece), blocks, source.block_bytes))
        _place(layout, parts, packed[first : first + step], len(piece), columns, lanes)
    return packed.reshape(-1)


def _place(layout: PackedFormat, parts: _Parts, out: np.ndarray, rows: int, columns: int, lanes: int) -> None:
    """Write the parts of `rows` rows into their row groups `out` (groups, stride)."""
    quant_bytes = layout.quant_bytes(columns, lanes)
    if layout.family == "float":
        _interleave(parts.codes.reshape(rows, columns), out[:, :quant_bytes], lanes)
        return
    blocks = columns // BLOCK
    codes = parts.codes.reshape(rows, blocks, BLOCK)
    plane = out[:, :quant_bytes].view(np.uint32).reshape(-1, blocks, layout.bits, lanes)
    unit, shift = 0, 0
    for width in layout.planes:
        quads = _plane(codes, width, shift).view(np.uint32).reshape(-1, lanes, blocks, width)
        plane[:, :, unit : unit + width] = quads.transpose(0, 2, 3, 1)
        unit, shift = unit + width, shift + width
    _place_header(layout, parts.header, out[:, quant_bytes:], rows, columns, lanes)


def _plane(codes: np.ndarray, width: int, shift: int) -> np.ndarray:
    """Bits [shift, shift + width) of codes (R, blocks, 32) as bytes (R, blocks, 4 * width).

    With n = 8 / width codes to a byte, byte i of quad j holds the codes of quads n' + j, as follows: width 4 pairs quad
    j with quad j + 4; width 2 takes quads 4 j to 4 j + 3; width 1 all 8 quads.
    """
    if width == 8:
        return np.ascontiguousarray(codes)
    if width == 4:
        return codes[..., :16] & 15 | codes[..., 16:] << 4
    bits = codes >> shift & (1 << width) - 1
    if width == 1:
        return np.packbits(bits.reshape(*codes.shape[:2], 8, QUAD), axis=2, bitorder="little")
    quads = bits.reshape(*codes.shape[:2], 2, 4, QUAD)
    return quads[..., 0, :] | quads[..., 1, :] << 2 | quads[..., 2, :] << 4 | quads[..., 3, :] << 6


def _place_header(layout: PackedFormat, fields: tuple[np.ndarray, ...], out: np.ndarray, rows: int, columns: int,
                  lanes: int) -> None:
    groups = columns // layout.group
    header = out[:, : groups * layout.header_bytes * lanes].reshape(-1, groups, layout.header_bytes * lanes)
    offset = 0
    for field in fields:
        unit = field.dtype.itemsize if field.dtype != np.uint8 else 2  # bytes that stay together in a row's lane
        words = np.ascontiguousarray(field.reshape(rows, groups, -1)).view(f"u{unit}")
        size = words.shape[2] * unit * lanes
        target = header[:, :, offset : offset + size]
        target[...] = np.ascontiguousarray(
            words.reshape(-1, lanes, groups, words.shape[2]).transpose(0, 2, 3, 1)).view(np.uint8).reshape(target.shape)
        offset += size


def _interleave(values: np.ndarray, out: np.ndarray, lanes: int) -> None:
    """(R, K) values to [K][L] in each row group."""
    rows, columns = values.shape
    out.view(values.dtype).reshape(-1, columns, lanes)[...] = values.reshape(-1, lanes, columns).transpose(0, 2, 1)
