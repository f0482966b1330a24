"""How the CPU runs the operators of drafter and round: features, KV injection, draws, acceptance, DFlash2's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.runtime.device_sampling import MOST_CANDIDATES
from dflashc.runtime.errors import BuildError
from dflashc.runtime.plan import Operand, Units
from dflashc.targets.context import ProgramContext, Rule, flatten
from dflashc.targets.cpu.kernels import accept as accept_kernels
from dflashc.targets.cpu.kernels import convolution, features, kv_linear, rejection, sampler, selector
from dflashc.targets.cpu.requests import cosine_sine, kernel_rows, rows_scalar
from dflashc.targets.cpu.traits import Traits
from dflashc.targets.injection import layers_by_buffer
from dflashc.targets.requests import request


def drafter_rules(traits: Traits) -> dict[str, Rule]:
    """The rules for a feature level, by operator."""

    def convolution_linear(c: ProgramContext, var: Expr, call: Expr) -> None:
        u, x, w, base, _, form = op.operands(call)
        weight, (_, taps, columns) = c.weight(w), map(int, op.shape(base))
        group_size = 2 * taps * columns // weight.rows
        units = math.ceil(columns / convolution.convolution_unit(traits, group_size, op.scalar(form)))
        c.launch(request(convolution.convolution_matmul, weight.format, c.rows, taps, group_size, op.scalar(form)),
                 weight.name, Units(units),
                 [*c.operands(x), c.operand(u), c.operand(w), c.operand(base), *flatten(c.result(var)), columns],
                 bytes_read=weight.bytes, flops=2 * c.rows * weight.rows * weight.columns)

    return {
        "dflashc.features": _features, "dflashc.kv_injection": _kv_injection, "dflashc.accept": _accept,
        "dflashc.draw": _draw, "dflashc.judge": _judge,
        "dflashc.convolution_linear": convolution_linear, "dflashc.norm_convolution": _norm_convolution,
        "dflashc.select_candidates": _select_candidates, "dflashc.best_candidate": _best_candidate,
    }


def _features(c: ProgramContext, var: Expr, call: Expr) -> None:
    """A launch per tap, side by side."""
    taps, form = op.operands(call)
    outputs = flatten(c.result(var))
    leading, column = sum(int(op.shape(t)[1]) for t in taps), 0
    for index, tap in enumerate(taps):
        columns = int(op.shape(tap)[1])
        c.launch(request(features.features, op.scalar(form)), "features", Units(c.rows),
                 [c.operand(tap), *outputs, columns, leading, column], barrier=index == len(taps) - 1)
        column += columns


def _kv_injection(c: ProgramContext, var: Expr, call: Expr) -> None:
    """One launch for all layers with the same window where their projections share a block format, else one for each
    projection; all side by side.
    """
    xs, weights, biases, norms, table, caches, state, kv_heads, size, pairing, epsilon, forms = op.operands(call)
    inputs = dict(zip(op.scalar(forms).split(","), xs, strict=True))
    heads, pairs = op.scalar(kv_heads), int(op.shape(table)[2])
    if op.scalar(size) % kv_linear.HEAD_UNIT:
        raise BuildError(f"a drafter with attention heads of {op.scalar(size)} elements found; this target needs a "
                         f"multiple of {kv_linear.HEAD_UNIT}")
    cosine, sine = cosine_sine(c.operand(table), c.rows, pairs)
    rows = kernel_rows(c.rows)
    runs = layers_by_buffer(c, weights, biases, norms, caches)
    for run in runs:
        packed = [c.weight(w) for w in run.weights]
        c.keep_adjacent([w.name for w in packed])
        bias, epilogue = ([c.operand(run.biases[0])], "store_bias") if run.biases else ([], "store")
        together = len({w.format for w in packed}) == 1
        for first, matrices in [(0, packed)] if together else [(i, [w]) for i, w in enumerate(packed)]:
            c.launch(request(kv_linear.kv_linear, matrices[0].format, rows, op.scalar(size), op.scalar(pairing),
                             epilogue, run.cache.type),
                     "KV injection", Units(len(matrices) * heads),
                     [*c.operands(inputs[matrices[0].form]), Operand("weight", matrices[0].name), *bias,
                      c.operand(run.norms[0]), c.operand(state), cosine, sine, *map(c.operand, run.caches[:2]),
                      *rows_scalar(rows, c.rows), matrices[0].columns, heads, run.cache.capacity, pairs, first,
                      float(op.scalar(epsilon))],
                     barrier=run is runs[-1] and matrices[-1] is packed[-1],
                     bytes_read=sum(w.bytes for w in matrices),
                     flops=sum(2 * c.rows * w.rows * w.columns for w in matrices))
    c.values[var] = []


def _accept(c: ProgramContext, var: Expr, call: Expr) -> None:
    c.launch(request(accept_kernels.accept), "accept", Units(1),
             [*(c.operand(x) for x in op.operands(call)), *flatten(c.result(var)), c.rows])


def _draw(c: ProgramContext, var: Expr, call: Expr) -> None:
    ranked, segments = _penalised_candidates(c, call)
    c.launch(request(sampler.draw), "draw", Units(c.rows), [*ranked, *flatten(c.result(var)), segments])


def _judge(c: ProgramContext, var: Expr, call: Expr) -> None:
    _, tokens, *_, candidates, probabilities = op.operands(call)
    ranked, segments = _penalised_candidates(c, call)
    c.launch(request(rejection.judge, int(op.shape(candidates)[1])), "judge", Units(c.rows),
             [*ranked, c.operand(tokens), c.operand(candidates), c.operand(probabilities), *flatten(c.result(var)),
              segments, c.rows])


def _penalised_candidates(c: ProgramContext, call: Expr) -> tuple[list[Operand], int]:
    """Of `draw` and `judge`: the best logits of each segment after the penalties, state and sampling; segments."""
    logits, *others = op.operands(call)
    tokens, state, history, sampling = (c.operand(x) for x in others[:4])
    vocabulary = int(op.shape(logits)[1])
    c.launch(request(sampler.penalise), "penalties", Units(c.rows),
             [c.operand(logits), tokens, state, history, sampling, c.temporary(c.rows * vocabulary * 4), vocabulary])
    value, index, segments = _top_candidates(c, logits, MOST_CANDIDATES)
    return [value, index, state, sampling], segments


def _norm_convolution(c: ProgramContext, var: Expr, call: Expr) -> None:
    x, z, dynamic, base, weight, epsilon, forms_text = op.operands(call)
    forms = tuple(filter(None, op.scalar(forms_text).split(",")))
    _, taps, columns = map(int, op.shape(base))
    group_size = taps * columns // int(op.shape(dynamic)[1])
    result = c.result(var)
    assert isinstance(result, list)
    normed = [c.operand(weight[0]), c.temporary(c.rows * columns * 4), *flatten(result[1:])] if forms else []
    c.launch(request(convolution.norm_convolution, taps, group_size, forms), "norm", Units(c.rows),
             [c.operand(x), c.operand(z), c.operand(dynamic), c.operand(base), *flatten(result[0]), *normed, columns,
              float(op.scalar(epsilon))])


def _select_candidates(c: ProgramContext, var: Expr, call: Expr) -> None:
    """The best logits of each segment, then one walk over the rows."""
    logits, d2t, projected, block, state, sampling, predecessor, successor, count = op.operands(call)
    kept, rank = op.scalar(count), int(op.shape(projected)[1])
    value, index, segments = _top_candidates(c, logits, kept, d2t)
    tables = [c.weight(predecessor).format, c.weight(successor).format]
    c.launch(request(selector.select_candidates, kept, *tables), "selector walk", Units(1),
             [value, index, *(c.operand(x) for x in (projected, block, predecessor, successor, state, sampling)),
              c.temporary(2 * rank * 4), *flatten(c.result(var)), c.rows, segments, rank])


def _best_candidate(c: ProgramContext, var: Expr, call: Expr) -> None:
    logits, d2t, count = op.operands(call)
    value, index, segments = _top_candidates(c, logits, op.scalar(count), d2t)
    c.launch(request(selector.best_candidate, op.scalar(count)), "best candidate", Units(c.rows),
             [value, index, *flatten(c.result(var)), segments])


def _top_candidates(c: ProgramContext, logits: Expr, count: int,
                    d2t: Sequence[Expr] = ()) -> tuple[Operand, Operand, int]:
    """The `count` best logits of each segment of a row: their values, their ids, and how many segments there are."""
    vocabulary = int(op.shape(logits)[1])
    segments = math.ceil(vocabulary / selector.SEGMENT)
    value, index = (c.temporary(c.rows * segments * count * 4) for _ in range(2))
    c.launch(request(selector.top_candidates, count, *(["d2t"] if len(d2t) else [])), "candidates",
             Units(c.rows * segments), [c.operand(logits), *map(c.operand, d2t), value, index, vocabulary])
    return value, index, segments
