"""Packed weights as a thread reads them: the codes of one row's block as words, its scales and minima as floats.

The inverse of `targets/packing.py` for one lane of a row group; the buffer is declared "uint32" everywhere. Knows
nothing of activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, bind, cast, f32, i32, load, reinterpret, u32
from dflashc.targets.gpu.kernels.exact_floats import float_of
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import ALIGNMENT, BLOCK, HALF, PackedFormat, plane_shift, plane_unit

LANES = 16
"""Rows of a row group."""

_EACH = 0x01010101
_SIGN = 0x80 * _EACH


@dataclass(frozen=True)
class PackedRow:
    """One row of a packed matrix: lane `lane` of the row group that starts at word `start`."""

    traits: Traits
    layout: PackedFormat
    weight: Expr
    start: Expr
    lane: Expr
    columns: Expr

    def quads(self, block: Expr, places: Sequence[Expr | int] = range(HALF)) -> list[list[Expr]]:
        """Of each half of the block the quads at `places` (0 to 3): codes less the format's offset, as words of four
        signed bytes, int32. What two of them have in common is read once.
        """
        first = bind(self.start + (block * self.layout.bits) * LANES + self.lane)
        held: dict[tuple[int, ...], Expr] = {}

        def quad(half: int, number: int) -> Expr:
            place, value, unit, shift = places[number], None, 0, 0
            for width in self.layout.planes:
                at = unit + plane_unit(width, half, place)
                key = (unit, half if width in (8, 2) else 0, number if width in (8, 4) else 0)
                if key not in held:
                    held[key] = bind(load(self.weight, first + at * LANES))
                part = _bits(held[key], width, plane_shift(width, half, place), shift)
                value = part if value is None else value | part
                unit, shift = unit + width, shift + width
            return bind(reinterpret("int32", bind(self._signed(value))))

        return [[quad(half, number) for number in range(len(places))] for half in range(2)]

    def _signed(self, codes: Expr) -> Expr:
        """Each byte less the offset; no byte borrows from the next, since its highest bit is set meanwhile."""
        if self.layout.bits == 8:
            return codes ^ u32(_SIGN)
        return ((codes | u32(_SIGN)) - u32(self.layout.offset * _EACH)) ^ u32(_SIGN) if self.layout.offset else codes

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
            return BlockScales((bind(reinterpret("float32", word)),), ())
        first = bind(headers + block * (LANES * (1 + layout.minimum)) + self.lane)
        minima = (bind(self.traits.half_to_float(self._half(first + LANES))),) if layout.minimum else ()
        return BlockScales((bind(self.traits.half_to_float(self._half(first))),), minima)

    def _super_scales(self, block: Expr) -> BlockScales:
        layout = self.layout
        blocks = layout.group // BLOCK
        header = bind(self._headers() + tirx.truncdiv(block, i32(blocks)) * (layout.header_bytes // 2 * LANES)
                      + self.lane)
        pair = self._half(header + tirx.truncmod(block, i32(blocks)) * LANES)
        floats = bind(header + blocks * LANES)
        scale = bind(self.traits.half_to_float(self._half(floats)))
        low, high = pair & u32(0xFF), tirx.shift_right(pair, u32(8))
        if not layout.minimum:
            signed = [tirx.shift_right(cast("int32", tirx.shift_left(part, u32(24))), i32(24)) for part in (low, high)]
            return BlockScales(tuple(_scaled(scale, s) for s in signed), ())
        subtracted = bind(f32(0) - bind(self.traits.half_to_float(self._half(floats + LANES))))
        if layout.name == "q2_k":
            nibbles = [(part & u32(15), tirx.shift_right(part, u32(4))) for part in (low, high)]
            return BlockScales(tuple(_scaled(scale, n) for n, _ in nibbles),
                               tuple(_scaled(subtracted, m) for _, m in nibbles))
        return BlockScales((_scaled(scale, low),), (_scaled(subtracted, high),))


def _scaled(scale: Expr, integer: Expr) -> Expr:
    """A float16 times an integer of 8 bits, exact in float32."""
    return bind(scale * float_of(cast("int32", integer)))


@dataclass(frozen=True)
class BlockScales:
    """weight = factors[h] * code + minima[h] of part h, the whole block or one of its halves; all float32.

    `minima` is empty in formats without.
    """

    factors: tuple[Expr, ...]
    minima: tuple[Expr, ...]


def block_parts(layout: PackedFormat) -> tuple[int, int]:
    """How many factors and how many minima a block has."""
    parts = 2 if layout.family == "super" and (layout.name == "q2_k" or not layout.minimum) else 1
    return parts, parts * layout.minimum


def quant_words(layout: PackedFormat, columns: Expr) -> Expr:
    """Words of a row group's quant plane."""
    return columns * layout.bits * LANES // 32 if isinstance(columns, int) else \
        tirx.truncdiv(columns, i32(2)) * (layout.bits * LANES // 16)


def group_words(layout: PackedFormat, columns: Expr) -> Expr:
    """Words from one row group to the next."""
    header = tirx.truncdiv(columns, i32(layout.group)) * (layout.header_bytes * LANES // 4)
    aligned = ALIGNMENT // 4
    return bind(tirx.truncdiv(quant_words(layout, columns) + header + (aligned - 1), i32(aligned)) * aligned)


def code_of(quad: Expr, element: int) -> Expr:
    """Code `element` (0 to 3) of a quad, int32."""
    return tirx.shift_right(tirx.shift_left(quad, i32(24 - 8 * element)), i32(24))


def _bits(word: Expr, width: int, position: Expr | int, target: int) -> Expr:
    """Bits [position, position + width) of each byte, moved to bit `target`."""
    if width == 8:
        return word
    mask = ((1 << width) - 1) * _EACH
    if not isinstance(position, int):
        return tirx.shift_left(tirx.shift_right(word, cast("uint32", position)) & u32(mask), u32(target))
    move = target - position
    moved = tirx.shift_left(word, u32(move)) if move > 0 else tirx.shift_right(word, u32(-move)) if move else word
    return moved & u32(mask << target)
