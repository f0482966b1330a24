"""Weight codes out of their bit planes, a quad of L rows at a time. The inverse of the quant plane of `packing`."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx

from dflashc.targets.cpu.builder import Expr, bind, const, i64, load, reinterpret
from dflashc.targets.cpu.traits import Traits
from dflashc.targets.packing import HALF, QUADS, PackedFormat, plane_shift, plane_unit


def block_quads(traits: Traits, layout: PackedFormat, weight: Expr, start: Expr,
                rows: int | None = None) -> Iterator[Expr]:
    """Emit loads and unpacking of one block; yields its 8 quads in order, as uint8 vectors (4 * rows).

    Parameters
    ----------
    start : int64
        In the buffer `weight` the first byte of the block, or of one row's lane in it.
    rows : int, optional
        1 to unpack a single row, all L rows when left out.
    """
    lanes = rows or traits.lanes
    words = "uint32" if lanes == 1 else f"uint32x{lanes}"

    def vector(unit: int) -> Expr:
        return bind(reinterpret(words, load(weight, start + i64(unit * 4 * traits.lanes), 4 * lanes)))

    held: dict[int, Expr] = {}
    for quad in range(QUADS):
        parts, first, shift = [], 0, 0
        for width in layout.planes:
            where = divmod(quad, HALF)
            unit, position = first + plane_unit(width, *where), plane_shift(width, *where)
            if unit not in held:
                held[unit] = vector(unit)
            parts.append(_bits(held[unit], words, width, position, shift))
            first, shift = first + width, shift + width
        value = parts[0]
        for part in parts[1:]:
            value = value | part
        yield bind(reinterpret(f"uint8x{4 * lanes}", value))


def _bits(vector: Expr, words: str, width: int, position: int, target: int) -> Expr:
    """Bits [position, position + width) of each byte, moved to bit `target`."""
    if width == 8:
        return vector
    move = target - position
    shift = tirx.shift_left if move > 0 else tirx.shift_right
    moved = shift(vector, const(abs(move), words)) if move else vector
    mask = ((1 << width) - 1) << target
    return moved & const(mask * 0x01010101, words)
