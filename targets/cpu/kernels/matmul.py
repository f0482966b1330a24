"""Matmuls of packed weights whose results are stored as float32.

A unit is one row group, so a thread streams through its share of the weights in the order in which they lie. Each unit
prefetches the next. Knows the formats only through `row_groups`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, i64, load, local, store
from dflashc.targets.cpu.kernels.activation import declare_form
from dflashc.targets.cpu.kernels.row_groups import row_group_products
from dflashc.targets.cpu.kernels.tiles import row_chunks, row_tiles, rows_name
from dflashc.targets.cpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS


def matmul(traits: Traits, format_name: str, rows: int | None, epilogue: str) -> Kernel:
    """y[m, column + r] = x[m] . w[r] (+ bias[r]). Unit = one row group: L rows of the weight.

    Parameters
    ----------
    rows : int or None
        Activation rows, at most 16; None for a runtime number, a multiple of 16.
    epilogue : str
        "store" or "store_bias".

    Notes
    -----
    Arguments: the activation's buffers, weight uint8, [bias float32,] output float32; then the scalars [rows,]
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
        with k.units() as group, row_chunks(count) as (first_row, size), row_tiles(traits, first_row, size) as tile:
            values = row_group_products(traits, layout, weight, group, activations, tile, columns)
            first = bind(group * i64(traits.lanes))
            targets = [bind(m * leading + column + first) for m in tile.rows]
            _store_rows(traits, output, targets, values, bias, first, bind(weight_rows - first))
    return k.kernel


def _store_rows(traits: Traits, output: Expr, targets: Sequence[Expr], values: Sequence[Expr], bias: Expr | None,
                first: Expr, left: Expr) -> None:
    """Store the vectors (+ bias from index `first` on); of the last row group only the `left` outputs that exist."""
    lanes = traits.lanes
    with T.If(left >= i64(lanes)):
        with T.Then():
            added = None if bias is None else bind(load(bias, first, lanes))
            for target, value in zip(targets, values, strict=True):
                store(output, target, value if added is None else value + added, lanes)
        with T.Else():
            spill = local(len(values) * lanes, "float32")
            for m, value in enumerate(values):
                store(spill, m * lanes, value, lanes)
            for m, target in enumerate(targets):
                with T.serial(i64(0), left) as lane:
                    value = load(spill, lane + i64(m * lanes))
                    store(output, target + lane, value if bias is None else value + load(bias, first + lane))
