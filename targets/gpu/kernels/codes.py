"""Packed weights as a thread reads them: the codes of one row's block as words, its scales and minima as floats.

The inverse of `targets/packing.py` for one lane of a row group; the buffer is declared "uint32" everywhere. Knows
nothing of activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, bind, cast, i32, load, reinterpret, u32
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import ALIGNMENT, BLOCK, QUADS, PackedFormat, plane_shift, plane_unit

LANES = 16
"""Rows of a row group."""

_SIGN = 0x80808080


@dataclass(frozen=True)
class PackedRow:
    """One row of a packed matrix: lane `lane` of the row group that starts at word `start`."""

    traits: Traits
    layout: PackedFormat
    weight: Expr
    start: Expr
    lane: Expr
    columns: Expr

    def words(self, block: Expr) -> list[Expr]:
        """The block's 32 codes as 8 words of 4 bytes, uint32, in the order of K: as stored, but 8-bit codes signed."""
        first = bind(self.start + (block * self.layout.bits) * LANES + self.lane)
        held: dict[int, Expr] = {}
        words = []
        for quad in range(QUADS):
            value, unit, shift = None, 0, 0
            for width in self.layout.planes:
                at = unit + plane_unit(width, quad)
                if at not in held:
                    held[at] = bind(load(self.weight, first + at * LANES))
                part = _bits(held[at], width, plane_shift(width, quad), shift)
                value = part if value is None else value | part
                unit, shift = unit + width, shift + width
            words.append(bind(value ^ u32(_SIGN) if self.layout.bits == 8 else value))
        return words

    def scales(self, block: Expr) -> BlockScales:
        """What the block's codes are multiplied with."""
        if self.layout.family == "block":
            return self._plain_scales(block)
        return self._super_scales(block)

    def value(self, element: Expr) -> Expr:
        """Element `element` of a float format, float32."""
        index = element * LANES + self.lane
        if self.layout.name == "f32":
            return bind(reinterpret("float32", load(self.weight, self.start + index)))
        bits = self._half(self.start * 2 + index)
        if self.layout.name == "bf16":
            return bind(reinterpret("float32", tirx.shift_left(bits, u32(16))))
        return bind(self.traits.half_to_float(bits))

    def _half(self, index: Expr) -> Expr:
        """The 16 bits at `index`, counted in halves from the buffer's start."""
        at = bind(index)
        word = load(self.weight, tirx.shift_right(at, i32(1)))
        return bind(tirx.shift_right(word, cast("uint32", (at & i32(1)) * 16)) & u32(0xFFFF))

    def _headers(self) -> Expr:
        """Where the headers start, in halves."""
        return bind((self.start + quant_words(self.layout, self.columns)) * 2)

    def _plain_scales(self, block: Expr) -> BlockScales:
        headers, layout = self._headers(), self.layout
        if layout.scale_dtype == "float32":
            word = load(self.weight, tirx.shift_right(headers, i32(1)) + block * LANES + self.lane)
            return BlockScales((), (), bind(reinterpret("float32", word)), None)
        first = bind(headers + block * (LANES * (1 + layout.minimum)) + self.lane)
        minimum = bind(self.traits.half_to_float(self._half(first + LANES))) if layout.minimum else None
        return BlockScales((), (), bind(self.traits.half_to_float(self._half(first))), minimum)

    def _super_scales(self, block: Expr) -> BlockScales:
        layout = self.layout
        blocks = layout.group // BLOCK
        header = bind(self._headers() + tirx.truncdiv(block, i32(blocks)) * (layout.header_bytes // 2 * LANES)
                      + self.lane)
        pair = self._half(header + tirx.truncmod(block, i32(blocks)) * LANES)
        floats = bind(header + blocks * LANES)
        scale = bind(self.traits.half_to_float(self._half(floats)))
        minimum = bind(self.traits.half_to_float(self._half(floats + LANES))) if layout.minimum else None
        low, high = pair & u32(0xFF), tirx.shift_right(pair, u32(8))
        if layout.name == "q2_k":
            nibbles = [bind(cast("int32", part & u32(15))) for part in (low, high)]
            minima = [bind(cast("int32", tirx.shift_right(part, u32(4)))) for part in (low, high)]
            return BlockScales(tuple(nibbles), tuple(minima), scale, minimum)
        if layout.minimum:
            return BlockScales((bind(cast("int32", low)),), (bind(cast("int32", high)),), scale, minimum)
        signed = [bind(tirx.shift_right(cast("int32", tirx.shift_left(part, u32(24))), i32(24)))
                  for part in (low, high)]
        return BlockScales(tuple(signed), (), scale, None)


@dataclass(frozen=True)
class BlockScales:
    """scale * Σ integers[h] * codes of part h, minus minimum * Σ minima[h] (minus minimum alone without minima).

    The integers are one for the whole block or one for each half, int32; none stands for 1.
    """

    integers: tuple[Expr, ...]
    minima: tuple[Expr, ...]
    scale: Expr
    minimum: Expr | None


def quant_words(layout: PackedFormat, columns: Expr) -> Expr:
    """Words of a row group's quant plane."""
    return columns * layout.bits * LANES // 32 if isinstance(columns, int) else \
        tirx.truncdiv(columns, i32(2)) * (layout.bits * LANES // 16)


def group_words(layout: PackedFormat, columns: Expr) -> Expr:
    """Words from one row group to the next."""
    header = tirx.truncdiv(columns, i32(layout.group)) * (layout.header_bytes * LANES // 4)
    aligned = ALIGNMENT // 4
    return bind(tirx.truncdiv(quant_words(layout, columns) + header + (aligned - 1), i32(aligned)) * aligned)


def code_offset(layout: PackedFormat) -> int:
    """What is still to be subtracted from the codes of `PackedRow.words`."""
    return 0 if layout.bits == 8 else layout.offset


def code_bytes(words: Sequence[Expr], element: int) -> Expr:
    """Code `element` (0 to 31) of a block's words, int32, not sign-extended."""
    return cast("int32", tirx.shift_right(words[element // 4], u32(8 * (element % 4))) & u32(0xFF))


def _bits(word: Expr, width: int, position: int, target: int) -> Expr:
    """Bits [position, position + width) of each byte, moved to bit `target`."""
    if width == 8:
        return word
    move = target - position
    moved = tirx.shift_left(word, u32(move)) if move > 0 else tirx.shift_right(word, u32(-move)) if move else word
    return moved & u32((((1 << width) - 1) << target) * 0x01010101)
