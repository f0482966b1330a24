"""What a workgroup of a matmul takes of weights and activations, and the parts in which it gives their products.

Knows nothing of what happens to the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, KernelBuilder, barrier, bind
from dflashc.targets.gpu.kernels.matrix_tiles import Tile
from dflashc.targets.gpu.kernels.row_groups import (
    MOST_ROWS,
    ROWS,
    Products,
    emit_store,
    emit_sums,
    packed_row,
    row_of_unit,
)
from dflashc.targets.gpu.matrix_units import matrix_unit
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import PackedFormat


class Share(NamedTuple):
    """What a workgroup takes: activation rows, at most 16 or those of a matrix unit, and units of 32 weight rows.

    More units share what is loaded of the activations, and leave fewer workgroups.
    """

    rows: int
    units: int

    def workgroups(self, rows: int, weight_rows: int) -> int:
        return math.ceil(rows / self.rows) * math.ceil(weight_rows / (ROWS * self.units))


def split(group: Expr, passes: Expr, rows: int) -> tuple[Expr, Expr]:
    """Which 32 weight rows a workgroup takes, and its first activation row.

    Neighbours take the same weights, so that these come from memory once and for the other passes from a cache.
    """
    return bind(tirx.truncdiv(group, passes)), bind(tirx.truncmod(group, passes) * rows)


def declare_products(k: KernelBuilder, share: Share, slices: int) -> Products:
    """Workgroup memory for the products of a part, see `emit_parts`."""
    return Products.declare(k, min(share.rows, MOST_ROWS), slices)


def emit_parts(traits: Traits, layout: PackedFormat, share: Share, weights: Sequence[tuple[Expr, Expr]], thread: Expr,
               weight_rows: Expr, activations: Sequence[Expr], first_row: Expr, columns: Expr,
               products: Products) -> Iterator[tuple[int, int]]:
    """Multiply `share.rows` activation rows with each of `weights`: (buffer, unit of 32 of its rows).

    Yields (index of the weight, activation row) once its products for `products.rows` rows from there on can be read;
    every thread must be done with them at the next step. Weight rows that do not exist give some product of others.
    """
    if share.rows > MOST_ROWS:
        unit = matrix_unit(traits)
        assert unit is not None, f"{share.rows} rows need a matrix unit"
        tile = Tile(traits, unit, layout, weights, weight_rows, activations, first_row, columns)
        yield from tile.emit(products, thread)
        return
    rows = [packed_row(traits, layout, weight, row_of_unit(unit, thread, weight_rows), columns)
            for weight, unit in weights]
    sums = emit_sums(rows, thread, activations, first_row, products)
    for index in range(len(weights)):
        if index:
            barrier()
        emit_store(products, thread, sums, index)
        yield index, 0
