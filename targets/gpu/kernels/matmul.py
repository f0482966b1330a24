"""Matmuls of packed weights: results stored as float32, as a gated unit, or reduced to the best row.

Knows the formats only through `row_groups`.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, Kernel, KernelBuilder, barrier, bind, f32, i32, load, local, store
from dflashc.targets.gpu.kernels.row_groups import (
    ROWS,
    SLICES,
    activation_arguments,
    rows_of_unit,
)
from dflashc.targets.gpu.kernels.shares import Share, declare_products, emit_parts, emit_products, split
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS


def matmul(traits: Traits, format_name: str, share: Share, epilogue: str, slices: int = SLICES) -> Kernel:
    """y[m, column + r] = x[m] . w[r] (+ bias[r]).

    Parameters
    ----------
    share : Share
        Of a workgroup; the launch has a multiple of its activation rows.
    epilogue : str
        "store" or "store_bias".
    slices : int
        Threads that share a weight row, see `row_groups`.

    Notes
    -----
    Arguments: the activation's buffers, weight, [bias float32,] output float32; then the scalars passes (of the
    launch), columns (K), weight_rows, leading (floats from one output row to the next), column (where the outputs
    start).
    """
    layout = PACKED_FORMATS[format_name]
    k = KernelBuilder("matmul", traits)
    biased = epilogue == "store_bias"
    arguments = [*activation_arguments(format_name), ("weight", "uint32"), *([("bias", "float32")] if biased else []),
                 ("output", "float32"),
                 *((n, "i32") for n in ("passes", "columns", "weight_rows", "leading", "column"))]
    with k.build(arguments) as values:
        activations, weight = values[: len(values) - (8 if biased else 7)], values[-8 if biased else -7]
        bias = values[-7] if biased else None
        output, passes, columns, weight_rows, leading, column = values[-6:]
        with k.workgroups(slices * ROWS) as (group, thread):
            products = declare_products(k, layout, share, slices)
            place, first_row = split(group, passes, share.rows)
            units = [bind(place * share.units + unit) for unit in range(share.units)]
            rows = [rows_of_unit(traits, layout, weight, unit, weight_rows, columns) for unit in units]
            for number, part_row in emit_parts(traits, layout, share, rows, thread, activations, first_row, products):
                first = bind(first_row + part_row)
                for turn in range(math.ceil(products.entries() / products.threads)):
                    entry = bind(thread + turn * products.threads)
                    row = bind(units[number] * ROWS + tirx.truncmod(entry, i32(ROWS)))
                    with T.If(tirx.all(entry < products.entries(), row < weight_rows)), T.Then():
                        value = products.total(entry)
                        if bias is not None:
                            value = bind(value + load(bias, row))
                        store(output, (first + tirx.truncdiv(entry, i32(ROWS))) * leading + column + row, value)
    return k.kernel


def matmul_argmax(traits: Traits, format_name: str, share: Share, slices: int = SLICES) -> Kernel:
    """The best of x[m] . w[r] over each 32 weight rows, the lowest index on ties; NaN never wins.

    `share` and `slices` as in `matmul`, for at most 16 activation rows and 32 weight rows.

    Notes
    -----
    Arguments: the activation's buffers, weight, value float32 and index int32 (ceil(weight_rows / 32), rows of the
    launch); then the scalars columns (K), weight_rows, total_rows (activation rows of the launch).
    """
    layout = PACKED_FORMATS[format_name]
    k = KernelBuilder("matmul_argmax", traits)
    arguments = [*activation_arguments(format_name), ("weight", "uint32"), ("value", "float32"), ("index", "int32"),
                 *((n, "i32") for n in ("columns", "weight_rows", "total_rows"))]
    with k.build(arguments) as values:
        *activations, weight, best, where, columns, weight_rows, total_rows = values
        with k.workgroups(slices * ROWS) as (group, thread):
            products = declare_products(k, layout, share, slices)
            totals = k.shared(products.entries(), "float32")
            unit, first_row = split(group, bind(tirx.truncdiv(total_rows, i32(share.rows))), share.rows)
            rows = rows_of_unit(traits, layout, weight, unit, weight_rows, columns)
            emit_products(traits, layout, share, rows, thread, activations, first_row, products)
            for turn in range(math.ceil(products.entries() / products.threads)):
                entry = bind(thread + turn * products.threads)
                with T.If(entry < products.entries()), T.Then():
                    store(totals, entry, products.total(entry))
            barrier()
            with T.If(thread < share.rows), T.Then():
                target = bind(unit * total_rows + first_row + thread)
                _emit_best(totals, thread, bind(unit * ROWS), weight_rows, (best, where), target)
    return k.kernel


def _emit_best(totals: Expr, row: Expr, first: Expr, weight_rows: Expr, outputs: tuple[Expr, Expr],
               target: Expr) -> None:
    """Store the largest of an activation row's 32 totals and its weight row."""
    value, index = local(1, "float32"), local(1, "int32")
    store(value, 0, f32(float("-inf")))
    store(index, 0, first)
    with T.serial(i32(0), tirx.min(weight_rows - first, i32(ROWS))) as r:
        total = bind(load(totals, row * ROWS + r))
        with T.If(total > load(value, 0)), T.Then():
            store(value, 0, total)
            store(index, 0, first + r)
    store(outputs[0], target, load(value, 0))
    store(outputs[1], target, load(index, 0))
