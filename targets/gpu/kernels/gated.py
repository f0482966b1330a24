"""The gated unit of a feed-forward layer: two matmuls, the activation, and the product in the next matmul's form.

Knows the formats only through `row_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, Kernel, KernelBuilder, barrier, bind, f32, fma, i32, load, select, store
from dflashc.targets.gpu.kernels.elementary import LOG2_E, exp2
from dflashc.targets.gpu.kernels.quantised_rows import emit_group, form_arguments
from dflashc.targets.gpu.kernels.row_groups import ROWS, SLICES, Products, activation_arguments, rows_of_unit
from dflashc.targets.gpu.kernels.shares import Share, declare_products, emit_parts, split
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS


def activate(activation: str, x: Expr) -> Expr:
    """"silu" x * sigmoid(x), or "gelu", its tanh approximation (Hendrycks and Gimpel 2016)."""
    if activation == "silu":
        return bind(x * _sigmoid(x))
    inner = bind(f32(2 * math.sqrt(2 / math.pi)) * x * fma(bind(f32(0.044715) * x), x, f32(1)))
    return bind(x * _sigmoid(inner))  # (1 + tanh(i)) / 2 = sigmoid(2 i)


def _sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x)), without overflow on either side."""
    e = exp2(bind(tirx.abs(x) * f32(-LOG2_E)))
    return bind(select(x < f32(0), e, f32(1)) / (f32(1) + e))


def gated_matmul(traits: Traits, format_name: str, share: Share, activation: str, form: str,
                 slices: int = SLICES) -> Kernel:
    """activation(x[m] . gate[r]) * (x[m] . up[r]) in `form`; a workgroup takes its share of both weights.

    Notes
    -----
    `share` and `slices` as in `matmul`. Arguments: the activation's buffers, gate, up, the output's buffers; then the
    scalars passes (of the launch), columns (K), weight_rows (of one of the two weights; a multiple of 32 where the form
    is quantised).
    """
    layout = PACKED_FORMATS[format_name]
    k = KernelBuilder("gated_matmul", traits)
    inputs, outputs = activation_arguments(format_name), form_arguments(form, "output")
    arguments = [*inputs, ("gate", "uint32"), ("up", "uint32"), *outputs,
                 *((n, "i32") for n in ("passes", "columns", "weight_rows"))]
    with k.build(arguments) as values:
        activations, (gate, up) = values[: len(inputs)], values[len(inputs) : len(inputs) + 2]
        buffers, (passes, columns, weight_rows) = values[len(inputs) + 2 : -3], values[-3:]
        with k.workgroups(slices * ROWS) as (group, thread):
            products = declare_products(k, layout, share, slices, matrices=2)
            place, first_row = split(group, passes, share.rows)
            units = [bind(place * share.units + unit) for unit in range(share.units)]
            gates = k.shared(share.rows * ROWS, "float32")

            def store_gate(entry: Expr, first: int) -> None:
                store(gates, entry + first * ROWS, activate(activation, products.total(entry)))

            def multiply(entry: Expr, first: int) -> None:
                at = bind(entry + first * ROWS)
                store(gates, at, bind(load(gates, at) * products.total(entry)))

            both = [rows_of_unit(traits, layout, weight, unit, weight_rows, columns)
                    for unit in units for weight in (gate, up)]
            for number, row in emit_parts(traits, layout, share, both, thread, activations, first_row, products):
                _each(products.entries(), products, thread, partial(multiply if number % 2 else store_gate, first=row))
                if number % 2 and row + products.rows == share.rows:
                    barrier()
                    _store(gates, share.rows, products, thread, units[number // 2], form, buffers, first_row,
                           weight_rows)
    return k.kernel


def _each(entries: int, products: Products, thread: Expr, body: Callable[[Expr], None]) -> None:
    """`body` for every entry, shared out among the threads."""
    for turn in range(math.ceil(entries / products.threads)):
        entry = bind(thread + turn * products.threads)
        with T.If(entry < entries), T.Then():
            body(entry)


def _store(gates: Expr, rows: int, products: Products, thread: Expr, unit: Expr, form: str, buffers: Sequence[Expr],
           first_row: Expr, weight_rows: Expr) -> None:
    """A unit's results, all its rows in workgroup memory, into the output."""
    if form != "f32":
        per_row = bind(tirx.truncdiv(weight_rows, i32(ROWS)))
        with T.If(tirx.all(thread < rows, unit < per_row)), T.Then():
            emit_group(gates, bind(thread * ROWS), buffers, bind((first_row + thread) * per_row + unit))
        return

    def store_value(entry: Expr) -> None:
        row = bind(unit * ROWS + tirx.truncmod(entry, i32(ROWS)))
        with T.If(row < weight_rows), T.Then():
            store(buffers[0], (first_row + tirx.truncdiv(entry, i32(ROWS))) * weight_rows + row, load(gates, entry))

    _each(rows * ROWS, products, thread, store_value)
