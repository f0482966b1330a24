"""How the CPU runs each fused operator: which kernels, with which operands, over how many units.

One rule per operator; together they place every operator that the passes leave. Knows no weight layout and no file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.runtime.errors import BuildError
from dflashc.runtime.plan import Buffer, Operand, Units
from dflashc.targets.context import ProgramContext, Rule, flatten
from dflashc.targets.cpu.kernels import activation, argmax, attention, attention_tile, embedding, matmul, norm, rope
from dflashc.targets.cpu.kernels import gated as gated_kernels
from dflashc.targets.cpu.requests import VERIFY_ROWS, cosine_sine, kernel_rows, rows_scalar
from dflashc.targets.cpu.rules_drafter import drafter_rules
from dflashc.targets.cpu.traits import AVX2, Traits
from dflashc.targets.requests import KernelRequest, request

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu"}

_SIDE_BY_SIDE = 16
"""Float32 arrays of a multiple of this length lie one behind the other without a gap, for weights start at 64 bytes."""

_GRAIN = 16
"""Row groups a thread claims at a time: each prefetches the next, so the first of a claim arrives cold."""


def make_rules(traits: Traits) -> dict[str, Rule]:
    """The rules for a feature level, by operator."""
    lanes = traits.lanes

    def embed(c: ProgramContext, var: Expr, call: Expr) -> None:
        tokens, table, scale = op.operands(call)
        weight = c.weight(table)
        c.launch(request(embedding.embed, weight.format), "embedding", Units(c.rows),
                 [c.operand(tokens), c.operand(table), *flatten(c.result(var)), weight.columns,
                  float(op.scalar(scale))])

    def rope_table(c: ProgramContext, var: Expr, call: Expr) -> None:
        _, state, frequencies, magnitude = op.operands(call)
        pairs = int(op.shape(frequencies)[0])
        (table,) = flatten(c.result(var))
        cosine, sine = cosine_sine(table, c.rows, pairs)
        c.launch(request(rope.rope_table), "rope table", Units(c.rows),
                 [c.operand(state), c.operand(frequencies), cosine, sine, pairs, float(op.scalar(magnitude))],
                 barrier=False)  # the embedding comes next and needs none of it

    def norm_rule(c: ProgramContext, var: Expr, call: Expr) -> None:
        x, delta, post_weight, weight, epsilon, forms_text = op.operands(call)
        forms = tuple(filter(None, op.scalar(forms_text).split(",")))
        columns = int(op.shape(x)[1])
        result = c.result(var)
        assert isinstance(result, list)
        operands: list[Operand | int | float] = [c.operand(x)]
        if len(delta):
            operands += [c.operand(delta[0]), *flatten(result[0])]
        else:
            result[0] = c.operand(x)
        if len(post_weight):
            operands.append(c.operand(post_weight[0]))
        if forms:
            operands += [c.operand(weight[0]), c.temporary(c.rows * columns * 4), *flatten(result[1:])]
        case = (bool(len(delta)), bool(len(post_weight)), forms)
        c.launch(KernelRequest(norm.norm_name(*case), norm.norm, case), "norm", Units(c.rows),
                 [*operands, columns, float(op.scalar(epsilon))])

    def quantise(c: ProgramContext, var: Expr, call: Expr) -> None:
        x, form = op.operands(call)
        _quantise(c, c.operand(x), op.scalar(form), flatten(c.result(var)), int(op.shape(x)[1]))

    def linear_group(c: ProgramContext, var: Expr, call: Expr) -> None:
        """One launch for neighbours of one block format, whose row groups then lie one behind the other."""
        xs, *groups, forms_text = op.operands(call)
        weights, biases = map(list, groups)
        inputs = dict(zip(op.scalar(forms_text).split(","), xs, strict=True))
        (output,) = flatten(c.result(var))
        rows = kernel_rows(c.rows)
        leading, column, first = sum(c.weight(w).rows for w in weights), 0, 0
        while first < len(weights):
            run = _run_of_one_format(c, weights[first:], max(lanes, _SIDE_BY_SIDE) if biases else lanes)
            packed = [c.weight(w) for w in run]
            outputs, bytes_read = sum(w.rows for w in packed), sum(w.bytes for w in packed)
            bias = [c.operand(biases[first])] if len(biases) else []
            c.keep_adjacent([w.name for w in packed])
            c.keep_adjacent([b.name for b in biases[first : first + len(run)]])
            first += len(run)
            c.launch(request(matmul.matmul, packed[0].format, rows, "store_bias" if bias else "store"),
                     " ".join(w.name for w in packed), Units(math.ceil(outputs / lanes)),
                     [*c.operands(inputs[packed[0].form]), c.operand(run[0]), *bias, output, *rows_scalar(rows, c.rows),
                      packed[0].columns, outputs, leading, column],
                     grain=_GRAIN, barrier=first == len(weights), bytes_read=bytes_read,
                     flops=2 * c.rows * outputs * packed[0].columns)
            column += outputs

    def gated_linear(c: ProgramContext, var: Expr, call: Expr) -> None:
        x, gate, up, act, _, result_form = op.operands(call)
        weight, form = c.weight(gate), op.scalar(result_form)
        rows = kernel_rows(c.rows)
        units = math.ceil(weight.rows / gated_kernels.gated_unit_rows(form))
        kernel = request(gated_kernels.gated_matmul, weight.format, rows, _ACTIVATIONS[op.scalar(act)], form)
        c.launch(kernel, weight.name, Units(units),
                 [*c.operands(x), c.operand(gate), c.operand(up), *flatten(c.result(var)), *rows_scalar(rows, c.rows),
                  weight.columns, weight.rows],
                 bytes_read=2 * weight.bytes,
                 flops=4 * c.rows * weight.rows * weight.columns)

    def gated(c: ProgramContext, var: Expr, call: Expr) -> None:
        y, act, form = op.operands(call)
        columns = int(op.shape(y)[1]) // 2
        units = c.rows * math.ceil(columns / gated_kernels.GATED_UNIT)
        c.launch(request(gated_kernels.gated, _ACTIVATIONS[op.scalar(act)], op.scalar(form)), "gated unit",
                 Units(units), [c.operand(y), *flatten(c.result(var)), columns])

    def elementwise(c: ProgramContext, var: Expr, call: Expr) -> None:
        """`scale` and `softcap`."""
        x, scalar = op.operands(call)
        name = op.name_of(call).removeprefix(op.PREFIX)
        count = c.rows * int(op.shape(x)[1])
        c.launch(request(getattr(argmax, name)), name, Units(math.ceil(count / argmax.SOFTCAP_UNIT)),
                 [c.operand(x), *flatten(c.result(var)), count, float(op.scalar(scalar))], grain=4)

    def linear_argmax(c: ProgramContext, var: Expr, call: Expr) -> None:
        x, w, d2t, _ = op.operands(call)
        weight = c.weight(w)
        rows, units = kernel_rows(c.rows), math.ceil(weight.rows / argmax.ARGMAX_UNIT)
        best, index = c.temporary(units * c.rows * 4), c.temporary(units * c.rows * 4)
        c.launch(request(argmax.matmul_argmax, weight.format, rows), weight.name, Units(units),
                 [*c.operands(x), c.operand(w), best, index, *rows_scalar(rows, c.rows), weight.columns, weight.rows],
                 bytes_read=weight.bytes,
                 flops=2 * c.rows * weight.rows * weight.columns)
        c.launch(request(argmax.argmax_reduce, *(["d2t"] if len(d2t) else [])), "arg-max", Units(c.rows),
                 [best, index, *map(c.operand, d2t), *flatten(c.result(var)), units, c.rows])

    return {
        "dflashc.embed": embed, "dflashc.rope_table": rope_table, "dflashc.norm": norm_rule,
        "dflashc.quantise": quantise, "dflashc.linear_group": linear_group, "dflashc.gated_linear": gated_linear,
        "dflashc.gated": gated, "dflashc.scale": elementwise, "dflashc.softcap": elementwise,
        "dflashc.linear_argmax": linear_argmax,
        "dflashc.attention_block": partial(_attention_block, lanes), **drafter_rules(traits),
    }


def _run_of_one_format(c: ProgramContext, weights: Sequence[Expr], group: int) -> list[Expr]:
    """The first weight and those behind it that can follow it in memory as rows of one matrix, in whole groups."""
    run = [weights[0]]
    for w in weights[1:]:
        if c.weight(w).format != c.weight(run[0]).format or c.weight(run[-1]).rows % group:
            break
        run.append(w)
    return run


def _attention_block(lanes: int, c: ProgramContext, var: Expr, call: Expr) -> None:
    """Verify programs: one launch for norms, rope, cache write and attention by parts, and one that merges the parts.

    Prefill programs write the cache first and attend block by block of rows. Heads are whole vectors of `lanes`.
    """
    qkv, norms, sinks, table, keys, values, state, *scalars = op.operands(call)
    query_heads, kv_heads, size, pairing, window, scale, mask, epsilon, form = (op.scalar(s) for s in scalars)
    if size % lanes:
        hint = "; target cpu-x86-64-v3 takes this model" if size % AVX2.lanes == 0 else ""
        raise BuildError(f"attention heads of {size} elements found; this target needs a multiple of {lanes}{hint}")
    group, normed = query_heads // kv_heads, len(norms) > 0
    pairs = int(op.shape(table)[2])
    leading = (query_heads + 2 * kv_heads) * size
    cosine, sine = cosine_sine(c.operand(table), c.rows, pairs)
    common = [c.operand(state), c.operand(qkv), cosine, sine]
    caches, kv = [c.operand(keys), c.operand(values)], c.cache(keys).type
    weights = [c.operand(w) for w in norms]
    sink = [c.operand(s) for s in sinks]
    denominator = ["sinks"] if sink else []
    tail = [float(epsilon)] if normed else []
    capacity = c.cache(keys).capacity
    label = keys.name.removesuffix(".k").replace("cache.", "blk.")
    outputs = flatten(c.result(var))
    columns = query_heads * size
    if c.rows in VERIFY_ROWS:
        queries = c.rows * group
        per_part = kv_heads * queries
        parts = attention.window_parts(window, c.rows) if window else None
        partial_values = c.share(_parts_buffer("attention.values", per_part * size * 4, parts))
        partial_sums = c.share(_parts_buffer("attention.sums", per_part * 2 * 4, parts))
        units = Units(kv_heads * parts) if parts else Units(kv_heads, c.rows, attention_tile.PART)
        c.launch(request(attention.attention, c.rows, group, size, pairing, normed, kv, mask), f"{label} attention",
                 units, [*common, *weights, *caches, partial_values, partial_sums, leading, kv_heads, capacity, window,
                         pairs, float(scale), *tail])
        direct = query_heads % attention.heads_per_unit(size, form) == 0
        merged_form = form if direct else "f32"
        merged = outputs if direct else [c.temporary(c.rows * columns * 4)]
        units = c.rows * query_heads // attention.heads_per_unit(size, merged_form)
        c.launch(request(attention.attention_merge, size, merged_form, mask, *denominator), f"{label} attention merge",
                 Units(units), [c.operand(state), partial_values, partial_sums, *sink, *merged, c.rows, kv_heads, group,
                                window])
        if not direct:
            _quantise(c, merged[0], form, outputs, columns)
        return
    blocks = Units(kv_heads * c.rows // attention.BLOCK)
    c.launch(request(attention.kv_write, size, pairing, normed, kv), f"{label} cache write", blocks,
             [*common, *weights[1:], *caches, leading, query_heads, kv_heads, capacity, pairs, *tail])
    attended = outputs if form == "f32" else [c.temporary(c.rows * columns * 4)]
    c.launch(request(attention.attention_prefill, group, size, pairing, normed, kv, *denominator),
             f"{label} attention", blocks, [*common, *weights[:1], *caches, *sink, *attended, c.rows, leading, kv_heads,
                                            capacity, window, pairs, float(scale), *tail])
    if form != "f32":
        _quantise(c, attended[0], form, outputs, columns)


def _quantise(c: ProgramContext, source: Operand, form: str, outputs: Sequence[Operand], columns: int) -> None:
    c.launch(request(activation.quantise, form), "quantise", Units(c.rows), [source, *outputs, columns])


def _parts_buffer(name: str, bytes_per_part: int, parts: int | None) -> Buffer:
    """Scratch for partial attention results: of so many parts, or of one per 256 tokens of context."""
    if parts is not None:
        return Buffer(name, "scratch", bytes_per_part * parts)
    return Buffer(name, "scratch", bytes_per_part, math.ceil(bytes_per_part / attention_tile.PART))
