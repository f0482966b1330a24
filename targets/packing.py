"""GGUF blocks to the layout of the matmuls: output rows interleaved, one lane each.

L rows (the lanes of a CPU level, 16 on GPUs) form a row group, stored as [quant plane | header plane], padded to 64
bytes.
Along K the quant plane consists of blocks of 32 codes. A block is cut into quads, 4 consecutive codes of one row, and
a quad takes 4 bytes of each row's lane: one vector load gives the same quad of L rows. Codes of 3 to 6 bits are split
into planes of 4, 2 and 1 bits. Knows nothing of files or models; see `PackedFormat` for the headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflashc.runtime.errors import BuildError
from dflashc.targets.gguf_blocks import BLOCK_TYPES, Parts

ALIGNMENT = 64
BLOCK = 32
"""Codes of a block of the quant plane."""
QUAD = 4
"""Consecutive codes of one row that share a 32-bit lane."""
QUADS = BLOCK // QUAD
"""Quads of a block."""
HALF = QUADS // 2
"""Quads of half a block."""
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
    """The packed format for a GGUF type; `substitution` tells the user where it is wider than the file's."""

    format: PackedFormat
    substitution: str = ""


def packed_format(type_name: str) -> Choice:
    """The packed format for a GGUF type such as "Q4_K". Raises `BuildError` for a type without one."""
    source = BLOCK_TYPES.get(type_name)
    if source is None:
        raise BuildError(f"there is no kernel for {type_name} weights; convert the model to one of "
                         f"{', '.join(sorted(BLOCK_TYPES))}")
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
    source = BLOCK_TYPES[type_name]
    if columns <= 0 or columns % max(layout.group, source.elements):
        raise BuildError(f"a {type_name} matrix has {columns} columns; the kernels need a multiple of "
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


def _place(layout: PackedFormat, parts: Parts, out: np.ndarray, rows: int, columns: int, lanes: int) -> None:
    """Write the parts of `rows` rows into their row groups `out` (groups, stride)."""
    quant_bytes = layout.quant_bytes(columns, lanes)
    if layout.family == "float":
        _interleave(parts.codes.reshape(rows, columns), out[:, :quant_bytes], lanes)
        return
    blocks = columns // BLOCK
    quads = np.ascontiguousarray(parts.codes).view(np.uint32).reshape(rows, blocks, QUADS)
    plane = out[:, :quant_bytes].view(np.uint32).reshape(-1, blocks, layout.bits, lanes)
    unit, shift = 0, 0
    for width in layout.planes:
        words = _plane(quads, width, shift).reshape(-1, lanes, blocks, width)
        plane[:, :, unit : unit + width] = words.transpose(0, 2, 3, 1)
        unit, shift = unit + width, shift + width
    _place_header(layout, parts.header, out[:, quant_bytes:], rows, columns, lanes)


def _plane(quads: np.ndarray, width: int, shift: int) -> np.ndarray:
    """Bits [shift, shift + width) of the codes in `quads` uint32 (R, blocks, 8), as words (R, blocks, width)."""
    if width == 8:
        return quads
    mask = np.uint32(((1 << width) - 1) * 0x01010101)
    plane = np.zeros((*quads.shape[:2], width), np.uint32)
    for quad in range(QUADS):
        where = divmod(quad, HALF)
        plane[..., plane_unit(width, *where)] |= (quads[..., quad] >> shift & mask) << plane_shift(width, *where)
    return plane


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


def plane_unit(width: int, half: int, place: Any) -> Any:
    """Which 4 bytes of a block's plane of `width` bits hold the bits of quad 4 * half + place; `place` may be an
    expression of a kernel."""
    return {8: HALF * half + place, 4: place, 2: half, 1: 0}[width]


def plane_shift(width: int, half: int, place: Any) -> Any:
    """The lowest bit of that quad's bits in each of these bytes."""
    return {8: 0, 4: HALF * half, 2: 2 * place, 1: HALF * half + place}[width]


def _interleave(values: np.ndarray, out: np.ndarray, lanes: int) -> None:
    """(R, K) values to [K][L] in each row group."""
    columns = values.shape[1]
    out.view(values.dtype).reshape(-1, columns, lanes)[...] = values.reshape(-1, lanes, columns).transpose(0, 2, 1)
