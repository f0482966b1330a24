"""How a GPU runs each fused operator: which kernels, with which operands, over how many workgroups.

One rule per operator; together with `rules_layers` and `rules_rounds` they place every operator that the passes leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.runtime.errors import BuildError
from dflashc.runtime.plan import Units
from dflashc.targets.context import PackedWeight, ProgramContext, Rule, Variants, flatten
from dflashc.targets.gpu.kernels import argmax, gated, matmul
from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.row_groups import MOST_ROWS, ROWS, SLICES
from dflashc.targets.gpu.matrix_units import FEWEST_ROWS
from dflashc.targets.gpu.requests import look_up, matrix_unit_for, rows_of_pass, share_of_matmul, split_offset
from dflashc.targets.gpu.rules_layers import ACTIVATIONS, layer_rules
from dflashc.targets.gpu.rules_rounds import round_rules
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.requests import request

_SLICES = (SLICES, 4, 16)
"""Slices of a matmul, the default first. A device may do best with fewer, for more workgroups at once, or with more,
for few and long rows."""


def make_rules(traits: Traits) -> dict[str, Rule]:
    """The rules for a GPU family, by operator."""
    matmuls = {"linear_group": _linear_group, "gated_linear": _gated_linear, "linear_argmax": _linear_argmax}
    return {**{f"dflashc.{name}": partial(rule, traits) for name, rule in matmuls.items()}, **layer_rules(traits),
            **round_rules(traits)}


def _variants(traits: Traits, weight: PackedWeight, outputs: int, rows: int, builder: Callable[..., Any],
              *arguments: Any, matrices: int = 1) -> Variants | None:
    """A matmul with every number of slices that is within the limits of the target, and with what may multiply steps
    of several rows. All matmuls of one shape and format choose alike, whatever they end with: `outputs` are the rows
    of all matrices.
    """
    results = MOST_ROWS * ROWS * 4  # bytes; a slice has as many products
    most = min(traits.most_threads // ROWS, traits.shared_bytes // results - 1)
    requests = {}
    for n, (unit, fewest_rows) in product((n for n in _SLICES if n <= most), _steps_by(traits, weight.format).items()):
        share = share_of_matmul(traits, weight.format, rows, matrices, fewest_rows)
        requests[f"{n} slices{unit}"] = request(builder, weight.format, share, *arguments,
                                                *([] if n == SLICES else [n]))
    return Variants(f"{weight.format} {outputs} x {weight.columns}", requests) if len(requests) > 1 else None


def _steps_by(traits: Traits, format_name: str) -> dict[str, int]:
    """What may multiply in steps, the default first, and from how many rows on the matrix unit does; 0 as it says."""
    unit = matrix_unit_for(traits, format_name)
    others = {", dot products": MOST_ROWS + 1, ", matrix unit": FEWEST_ROWS} if unit else {}
    return {"": 0, **{name: rows for name, rows in others.items() if unit and rows != unit.fewest_rows}}


def _linear_group(traits: Traits, c: ProgramContext, var: Expr, call: Expr) -> None:
    """One launch for neighbours of one block format, whose row groups then lie one behind the other."""
    xs, *groups, forms_text = op.operands(call)
    weights, biases = map(list, groups)
    inputs = dict(zip(op.scalar(forms_text).split(","), xs, strict=True))
    (output,) = flatten(c.result(var))
    leading, column, first = sum(c.weight(w).rows for w in weights), 0, 0
    while first < len(weights):
        run = _run_of_one_format(c, weights[first:])  # also of biases: LANES floats lie side by side without a gap
        packed = [c.weight(w) for w in run]
        outputs, columns = sum(w.rows for w in packed), packed[0].columns
        share = share_of_matmul(traits, packed[0].format, c.rows)
        bias = [c.operand(biases[first])] if len(biases) else []
        c.keep_adjacent([w.name for w in packed])
        c.keep_adjacent([b.name for b in biases[first : first + len(run)]])
        first += len(run)
        epilogue = "store_bias" if bias else "store"
        c.launch(request(matmul.matmul, packed[0].format, share, epilogue),
                 " ".join(w.name for w in packed), Units(share.workgroups(c.rows, outputs)),
                 [*c.operands(inputs[packed[0].form]), c.operand(run[0]), *bias, output, c.rows // share.rows, columns,
                  outputs, leading, column],
                 barrier=first == len(weights), bytes_read=sum(w.bytes for w in packed),
                 flops=2 * c.rows * outputs * columns,
                 variants=_variants(traits, packed[0], outputs, c.rows, matmul.matmul, epilogue))
        column += outputs


def _gated_linear(traits: Traits, c: ProgramContext, var: Expr, call: Expr) -> None:
    x, gate, up, act, _, result_form = op.operands(call)
    weight, form = c.weight(gate), op.scalar(result_form)
    if form != "f32" and weight.rows % ROWS:
        raise BuildError(f"{weight.name} has {weight.rows} rows; GPU targets need a multiple of {ROWS} in gated layers")
    share = share_of_matmul(traits, weight.format, c.rows, matrices=2)
    case = (ACTIVATIONS[op.scalar(act)], form)
    c.launch(request(gated.gated_matmul, weight.format, share, *case), weight.name,
             Units(share.workgroups(c.rows, weight.rows)),
             [*c.operands(x), c.operand(gate), c.operand(up), *flatten(c.result(var)), c.rows // share.rows,
              weight.columns, weight.rows],
             bytes_read=2 * weight.bytes, flops=4 * c.rows * weight.rows * weight.columns,
             variants=_variants(traits, weight, 2 * weight.rows, c.rows, gated.gated_matmul, *case, matrices=2))


def _linear_argmax(traits: Traits, c: ProgramContext, var: Expr, call: Expr) -> None:
    x, w, d2t, _ = op.operands(call)
    weight, rows = c.weight(w), rows_of_pass(c.rows)
    share = share_of_matmul(traits, weight.format, rows)
    parts = -(-weight.rows // ROWS)
    best, index = c.temporary(parts * c.rows * 4), c.temporary(parts * c.rows * 4)
    c.launch(request(matmul.matmul_argmax, weight.format, share), weight.name,
             Units(share.workgroups(c.rows, weight.rows)),
             [*c.operands(x), c.operand(w), best, index, weight.columns, weight.rows, c.rows],
             bytes_read=weight.bytes, flops=2 * c.rows * weight.rows * weight.columns,
             variants=_variants(traits, weight, weight.rows, rows, matmul.matmul_argmax))
    (ids,) = flatten(c.result(var))
    found, first = (c.temporary(c.rows * 4), 0) if len(d2t) else split_offset(ids)
    c.launch(request(argmax.argmax_reduce), "arg-max", Units(c.rows), [best, index, found, parts, c.rows, first])
    if len(d2t):
        look_up(c, found, d2t[0], ids, c.rows)


def _run_of_one_format(c: ProgramContext, weights: Sequence[Expr]) -> list[Expr]:
    """The first weight and those behind it that can follow it in memory as rows of one matrix."""
    run = [weights[0]]
    for w in weights[1:]:
        if c.weight(w).format != c.weight(run[0]).format or c.weight(run[-1]).rows % LANES:
            break
        run.append(w)
    return run
