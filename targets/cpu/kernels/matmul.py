"""Matmuls of packed weights: tiles of activation rows, and what happens to the results (epilogues).

A unit is one row group, so every thread streams through the weights in the order in which they lie. Knows the formats
only through `row_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, i64, load, local, store
from dflashc.targets.cpu.kernels.activation import declare_form
from dflashc.targets.cpu.kernels.row_groups import row_group_products
from dflashc.targets.cpu.packing import PACKED_FORMATS
from dflashc.targets.cpu.traits import Traits

TILE = {16: 8, 8: 4}
"""Activation rows that share a pass over a row group's weights, by lanes: what 32 or 16 vector registers hold."""


def tile_rows(traits: Traits, rows: int | None) -> int:
    """Rows of a tile: as few passes as registers allow, of even size. None stands for a runtime number of rows."""
    limit = TILE[traits.lanes]
    if rows is None:
        return limit
    return -(-rows // -(-rows // limit))


@contextmanager
def row_tiles(traits: Traits, rows: Expr | int) -> Iterator[list[Expr]]:
    """Loop over tiles of activation rows; gives the rows' indices.

    The last tile overlaps the one before it where rows are no multiple of the tile: a row computed twice comes out
    the same. A runtime number of rows must be a multiple of the tile.
    """
    size = tile_rows(traits, rows if isinstance(rows, int) else None)
    if isinstance(rows, int) and rows <= size:
        yield [i64(m) for m in range(rows)]
        return
    count = i64(-(-rows // size)) if isinstance(rows, int) else tirx.floordiv(rows, i64(size))
    with T.serial(i64(0), count) as tile:
        first = bind(tirx.min(tile * i64(size), (i64(rows) if isinstance(rows, int) else rows) - i64(size)))
        yield [bind(first + i64(m)) for m in range(size)]


def matmul(traits: Traits, format_name: str, rows: int | None, epilogue: str) -> Kernel:
    """y[m, column + r] = x[m] . w[r] (+ bias[r]). Unit = one row group: L rows of the weight.

    Parameters
    ----------
    rows : int or None
        Activation rows; None for a runtime number, a multiple of 8, as the first scalar argument.
    epilogue : str
        "store" or "store_bias".

    Notes
    -----
    Arguments: the activation's buffers, weight uint8, [bias float32,] output float32, then the scalars [rows,]
    columns (K), weight_rows, leading (floats from one output row to the next), column (where the outputs start).
    """
    layout = PACKED_FORMATS[format_name]
    k = KernelBuilder(f"matmul_{format_name}_{rows_name(rows)}_{epilogue}", traits)
    with k.build():
        activations = declare_form(k, layout.form, "input")
        weight = k.buffer("weight", "uint8")
        bias = k.buffer("bias", "float32") if epilogue == "store_bias" else None
        output = k.buffer("output", "float32")
        count = k.scalar("rows") if rows is None else rows
        columns, weight_rows = k.scalar("columns"), k.scalar("weight_rows")
        leading, column = k.scalar("leading"), k.scalar("column")
        with k.units() as group, row_tiles(traits, count) as tile:
            values = row_group_products(traits, layout, weight, group, activations, tile, columns)
            first = bind(group * i64(traits.lanes))
            left = bind(weight_rows - first)
            if bias is not None:
                added = bind(load(bias, first, traits.lanes))
                values = [bind(v + added) for v in values]
            _store_rows(traits, output, [bind(m * leading + column + first) for m in tile], values, left)
    return k.kernel


def rows_name(rows: int | None) -> str:
    return "rows" if rows is None else f"m{rows}"


def _store_rows(traits: Traits, output: Expr, targets: Sequence[Expr], values: Sequence[Expr], left: Expr) -> None:
    """Store the vectors; of the last row group only the `left` outputs that exist."""
    lanes = traits.lanes
    with T.If(left >= i64(lanes)):
        with T.Then():
            for target, value in zip(targets, values, strict=True):
                store(output, target, value, lanes)
        with T.Else():
            spill = local(len(values) * lanes, "float32")
            for m, value in enumerate(values):
                store(spill, m * lanes, value, lanes)
            for m, target in enumerate(targets):
                with T.serial(i64(0), left) as lane:
                    store(output, target + lane, load(spill, lane + i64(m * lanes)))
