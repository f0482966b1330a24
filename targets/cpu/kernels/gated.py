"""Gated units, h = f(gate) * up, quantised into the form that the down projection reads.

As the epilogue of a matmul with both weights, or on its own where their formats differ. Knows nothing of formats.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, i64, load, local, store
from dflashc.targets.cpu.kernels.activation import FORMS, declare_form, emit_quantise
from dflashc.targets.cpu.kernels.row_groups import row_group_products
from dflashc.targets.cpu.kernels.tiles import row_chunks, row_tiles, rows_name
from dflashc.targets.cpu.kernels.vector_math import gelu, silu
from dflashc.targets.cpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS

ACTIVATIONS: dict[str, Callable[[Traits, Expr], Expr]] = {"silu": silu, "gelu": gelu}
"""Functions of the gate; "gelu" is the tanh form."""

GATED_UNIT = 256
"""Columns of a unit of `gated`."""


def gated_unit_rows(form: str) -> int:
    """Outputs of a unit of `gated_matmul`: whole groups of the form, and whole row groups."""
    return max(32, FORMS[form].group)


def gated_matmul(traits: Traits, format_name: str, rows: int | None, activation: str, form: str) -> Kernel:
    """h[m, r] = f(x[m] . gate[r]) * (x[m] . up[r]), stored in `form`. Unit = `gated_unit_rows(form)` outputs.

    Parameters
    ----------
    rows : int or None
        Activation rows, at most 16; None for a runtime number, a multiple of 16.
    activation : str
        "silu" or "gelu".
    form : str
        Form of h. The weights' rows must be a multiple of `gated_unit_rows(form)`.

    Notes
    -----
    Arguments: the activation's buffers, gate and up uint8 (same format), the buffers of h; then the scalars [rows,]
    columns (K), weight_rows (of each weight).
    """
    layout = PACKED_FORMATS[format_name]
    outputs = gated_unit_rows(form)
    groups = outputs // traits.lanes
    k = KernelBuilder(f"gated_matmul_{format_name}_{rows_name(rows)}_{activation}_{form}", traits)
    with k.build():
        activations = declare_form(k, layout.form, "input")
        gate, up = k.buffer("gate", "uint8"), k.buffer("up", "uint8")
        hidden = declare_form(k, form, "output")
        count = k.scalar("rows") if rows is None else rows
        columns, weight_rows = k.scalar("columns"), k.scalar("weight_rows")
        with k.units() as unit, row_chunks(count) as (first_row, size):
            values = local(size * outputs, "float32")
            with T.serial(i64(0), i64(groups)) as g, row_tiles(traits, first_row, size) as tile:
                group = bind(unit * i64(groups) + g)
                gates = row_group_products(traits, layout, gate, group, activations, tile, columns)
                ups = row_group_products(traits, layout, up, group, activations, tile, columns)
                for row, gate_value, up_value in zip(tile.rows, gates, ups, strict=True):
                    target = (row - first_row) * i64(outputs) + g * i64(traits.lanes)
                    store(values, target, ACTIVATIONS[activation](traits, gate_value) * up_value, traits.lanes)
            with T.serial(i64(0), i64(size)) as m:
                element = (first_row + m) * weight_rows + unit * i64(outputs)
                emit_quantise(traits, form, values, m * i64(outputs), outputs, hidden, element)
    return k.kernel


def gated(traits: Traits, activation: str, form: str) -> Kernel:
    """h = f(gate) * up, stored in `form`. Unit = up to 256 columns of a row: M * ceil(columns / 256) units.

    Arguments: gate_up float32 (M, 2 * columns), a row's gates before its ups; the buffers of h; then the scalar
    columns, a multiple of 32 and of the form's group.
    """
    k = KernelBuilder(f"gated_{activation}_{form}", traits)
    with k.build():
        gate_up = k.buffer("gate_up", "float32")
        hidden = declare_form(k, form, "output")
        columns = k.scalar("columns")
        parts = bind(tirx.floordiv(columns + i64(GATED_UNIT - 1), i64(GATED_UNIT)))
        with k.units() as unit:
            row = bind(tirx.floordiv(unit, parts))
            first = bind((unit - row * parts) * i64(GATED_UNIT))
            count = bind(tirx.min(columns - first, i64(GATED_UNIT)))
            gate_start = bind(row * i64(2) * columns + first)
            values = local(GATED_UNIT, "float32")
            with T.serial(i64(0), tirx.floordiv(count, i64(traits.lanes))) as step:
                offset = bind(step * i64(traits.lanes))
                gate = bind(load(gate_up, gate_start + offset, traits.lanes))
                up = load(gate_up, gate_start + columns + offset, traits.lanes)
                store(values, offset, ACTIVATIONS[activation](traits, gate) * up, traits.lanes)
            emit_quantise(traits, form, values, 0, count, hidden, row * columns + first)
    return k.kernel
