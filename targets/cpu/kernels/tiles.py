"""Tiles of activation rows, and the prefetching that the tiles of a row group share.

A matmul passes over a row group's weights once per tile. Knows nothing of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, i64, load
from dflashc.targets.cpu.traits import Traits
from dflashc.targets.packing import ALIGNMENT, BLOCK, PackedFormat

MAX_ROWS = 16
"""Rows of the largest kernel with a fixed number of rows; a runtime number of rows is a multiple of it."""

_TILE = {16: 8, 8: 4}  # rows, by lanes: what 32 or 16 vector registers hold
_ALL_LEVELS = 3  # "locality" of llvm.prefetch: what a large row group drives out of L1 again is still in L2


@dataclass(frozen=True)
class Tile:
    """Activation rows that share a pass over a row group's weights: their indices, and which pass of how many it is."""

    rows: tuple[Expr, ...]
    index: Expr
    passes: int


def rows_name(rows: int | None) -> str:
    """The part of a kernel's name that tells its rows; None stands for a runtime number."""
    return "rows" if rows is None else str(rows)


@contextmanager
def row_chunks(rows: Expr | int) -> Iterator[tuple[Expr, int]]:
    """Loop over all rows in chunks of at most MAX_ROWS; gives a chunk's first row and its compile-time size."""
    if isinstance(rows, int):
        yield i64(0), rows
        return
    with T.serial(i64(0), tirx.floordiv(rows, i64(MAX_ROWS))) as chunk:
        yield bind(chunk * i64(MAX_ROWS)), MAX_ROWS


@contextmanager
def row_tiles(traits: Traits, first: Expr, rows: int) -> Iterator[Tile]:
    """Loop over tiles of the rows [first, first + rows): as few as registers allow, all of one size.

    The last tile overlaps the one before it where it must; a row that is computed twice comes out the same.
    """
    passes = -(-rows // _TILE[traits.lanes])
    size = -(-rows // passes)
    if passes == 1:
        yield Tile(tuple(bind(first + i64(m)) for m in range(rows)), i64(0), 1)
        return
    with T.serial(i64(0), i64(passes)) as index:
        start = bind(first + tirx.min(index * i64(size), i64(rows - size)))
        yield Tile(tuple(bind(start + i64(m)) for m in range(size)), index, passes)


class Prefetch:
    """Prefetches the next row group during this one, a share at every block of every pass.

    The hardware prefetchers lose the stream of weights among those of several activation rows.
    """

    def __init__(self, traits: Traits, layout: PackedFormat, tile: Tile, next_group: Expr, columns: Expr) -> None:
        """`next_group` is the next row group's first byte in the weight."""
        block_bytes = (BLOCK * layout.bits // 8 + BLOCK * layout.header_bytes // layout.group) * traits.lanes
        self._share = -(-block_bytes // tile.passes)
        blocks = tirx.floordiv(columns, i64(BLOCK))
        self._first = bind(next_group + tile.index * blocks * i64(self._share))

    def emit(self, weight: Expr, block: Expr) -> None:
        """Prefetch the share of this pass's block number `block`."""
        start = bind(self._first + block * i64(self._share))
        for line in range(0, self._share, ALIGNMENT):
            address = tirx.address_of(load(weight, start + i64(line)))
            hints = (tirx.const(value, "int32") for value in (0, _ALL_LEVELS, 1))  # read, locality, data
            T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *hints))
