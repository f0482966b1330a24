"""What a workgroup of a matmul takes of weights and activations, and the parts in which it gives their products.

Knows nothing of what happens to the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, KernelBuilder, barrier, bind
from dflashc.targets.gpu.kernels.matrix_tiles import Tile, products_room
from dflashc.targets.gpu.kernels.row_groups import (
    MOST_ROWS,
    ROWS,
    SLICES,
    Products,
    UnitRows,
    emit_store,
    emit_sums,
    row_of_thread,
)
from dflashc.targets.gpu.matrix_units import matrix_unit
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import PackedFormat


class Share(NamedTuple):
    """What a workgroup takes: activation rows, and units of 32 weight rows; more units share what is loaded of the
    activations, and leave fewer workgroups.

    Attributes
    ----------
    by : str
        What multiplies: "dots" of four bytes, of at most 16 activation rows, or the "matrix" unit, of 64 or of 8 to 16.
        Both give the same bits.
    """

    rows: int
    units: int
    by: str = "dots"

    def workgroups(self, rows: int, weight_rows: int) -> int:
        return math.ceil(rows / self.rows) * math.ceil(weight_rows / (ROWS * self.units))


def split(group: Expr, passes: Expr, rows: int) -> tuple[Expr, Expr]:
    """Which 32 weight rows a workgroup takes, and its first activation row.

    Neighbours take the same weights, so that these come from memory once and for the other passes from a cache.
    """
    return bind(tirx.truncdiv(group, passes)), bind(tirx.truncmod(group, passes) * rows)


def declare_products(k: KernelBuilder, layout: PackedFormat, share: Share, slices: int = SLICES,
                     matrices: int = 1) -> Products:
    """Workgroup memory for the products of a part, see `emit_parts`, of the units of `matrices` weights."""
    room = products_room(layout, share.rows, share.units * matrices, slices) if share.by == "matrix" else 0
    return Products.declare(k, min(share.rows, MOST_ROWS), slices, room)


def emit_parts(traits: Traits, layout: PackedFormat, share: Share, weights: Sequence[UnitRows], thread: Expr,
               activations: Sequence[Expr], first_row: Expr, products: Products) -> Iterator[tuple[int, int]]:
    """Multiply `share.rows` activation rows with each of `weights`.

    Yields (index of the weight, activation row) once its products for `products.rows` rows from there on can be read;
    every thread must be done with them at the next step. Weight rows that do not exist give some product of others.
    """
    if share.by == "matrix":
        unit = matrix_unit(traits)
        assert unit is not None, f"{traits.code} {traits.arch} has no matrix unit"
        yield from Tile(unit, layout, weights, activations, first_row, share.rows).emit(products, thread)
        return
    sums = emit_sums([row_of_thread(rows, thread) for rows in weights], thread, activations, first_row, products)
    for index in range(len(weights)):
        if index:
            barrier()
        emit_store(products, thread, sums, index)
        yield index, 0


def emit_products(traits: Traits, layout: PackedFormat, share: Share, rows: UnitRows, thread: Expr,
                  activations: Sequence[Expr], first_row: Expr, products: Products) -> None:
    """Multiply at most 16 activation rows with 32 weight rows; then all threads may read `products`."""
    assert share.rows == products.rows
    for _ in emit_parts(traits, layout, share, [rows], thread, activations, first_row, products):
        pass
