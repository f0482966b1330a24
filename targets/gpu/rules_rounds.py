"""How a GPU runs the operators of drafter and round: KV injection, draws, acceptance, DFlash2's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.runtime.device_sampling import MOST_CANDIDATES
from dflashc.runtime.errors import BuildError
from dflashc.runtime.plan import Operand, Units
from dflashc.targets.context import PackedWeight, ProgramContext, Rule, flatten
from dflashc.targets.gpu.kernels import (
    accept,
    candidates,
    convolution,
    kv_injection,
    penalties,
    rejection,
    sampler,
    selector,
)
from dflashc.targets.gpu.requests import check_heads, look_up, rows_of_pass, share_of_matmul, split_offset
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.injection import layers_by_buffer
from dflashc.targets.requests import KernelRequest, request


def round_rules(traits: Traits) -> dict[str, Rule]:
    """The rules for a GPU family, by operator."""
    matmuls = {"kv_injection": _kv_injection, "convolution_linear": _convolution_linear}
    return {**{f"dflashc.{name}": partial(rule, traits) for name, rule in matmuls.items()},
            "dflashc.accept": _accept, "dflashc.draw": _draw, "dflashc.judge": _judge,
            "dflashc.best_candidate": _best_candidate, "dflashc.norm_convolution": _norm_convolution,
            "dflashc.select_candidates": _select_candidates}


def _kv_injection(traits: Traits, c: ProgramContext, var: Expr, call: Expr) -> None:
    """A launch per window and block format, side by side; most drafters have one of each."""
    xs, weights, biases, norms, table, caches, state, kv_heads, size, pairing, epsilon, forms = op.operands(call)
    inputs = dict(zip(op.scalar(forms).split(","), xs, strict=True))
    heads, head_size = op.scalar(kv_heads), op.scalar(size)
    rows = rows_of_pass(c.rows)
    launches = [(run, first, numbers) for run in layers_by_buffer(c, weights, biases, norms, caches)
                for first, numbers in _launches_of_matrices([c.weight(w) for w in run.weights])]
    for index, (run, first, numbers) in enumerate(launches):
        check_heads("drafter", head_size, run.cache.type, kv_injection.MOST_SIZE)
        bias, epilogue = ([c.operand(run.biases[0])], "store_bias") if run.biases else ([], "store")
        matrices = [c.weight(run.weights[n]) for n in numbers]
        c.keep_adjacent([w.name for w in matrices])
        consecutive = numbers == list(range(first, first + len(numbers)))
        members = 0 if consecutive else sum(1 << n - first for n in numbers)
        share = share_of_matmul(traits, matrices[0].format, rows)
        c.launch(request(kv_injection.kv_injection, matrices[0].format, share, head_size, op.scalar(pairing),
                         epilogue, run.cache.type),
                 "KV injection", Units(c.rows // rows * len(matrices) * heads),
                 [*c.operands(inputs[matrices[0].form]), Operand("weight", matrices[0].name), *bias,
                  c.operand(run.norms[0]), c.operand(state), c.operand(table), *map(c.operand, run.caches[:2]),
                  matrices[0].columns, heads, first, members, run.cache.capacity, c.rows,
                  int(op.shape(table)[2]), float(op.scalar(epsilon))],
                 barrier=index == len(launches) - 1, bytes_read=sum(w.bytes for w in matrices),
                 flops=sum(2 * c.rows * w.rows * w.columns for w in matrices))
    c.values[var] = []


def _launches_of_matrices(packed: Sequence[PackedWeight]) -> list[tuple[int, list[int]]]:
    """The first matrix and the numbers of all matrices of each launch: all there are where they share a block format,
    else those of each format, among as many as a launch can choose from.
    """
    numbers = list(range(len(packed)))
    formats = list(dict.fromkeys(w.format for w in packed))
    if len(formats) == 1:
        return [(0, numbers)]
    windows = [numbers[i : i + kv_injection.MOST_MEMBERS] for i in range(0, len(packed), kv_injection.MOST_MEMBERS)]
    chosen = [[n for n in window if packed[n].format == name] for window in windows for name in formats]
    return [(some[0], some) for some in chosen if some]


def _accept(c: ProgramContext, var: Expr, call: Expr) -> None:
    c.launch(request(accept.accept), "accept", Units(1),
             [*(c.operand(x) for x in op.operands(call)), *flatten(c.result(var)), c.rows])


def _draw(c: ProgramContext, var: Expr, call: Expr) -> None:
    c.launch(request(sampler.draw), "draw", Units(c.rows), [*_penalised_candidates(c, call), *flatten(c.result(var))])


def _judge(c: ProgramContext, var: Expr, call: Expr) -> None:
    _, tokens, *_, proposed, probabilities = op.operands(call)
    c.launch(request(rejection.judge, int(op.shape(proposed)[1])), "judge", Units(c.rows),
             [*_penalised_candidates(c, call), *(c.operand(x) for x in (tokens, proposed, probabilities)),
              *flatten(c.result(var)), c.rows])


def _penalised_candidates(c: ProgramContext, call: Expr) -> list[Operand]:
    """Of `draw` and `judge`: the best logits of each row after the penalties, their ids, state and sampling."""
    logits, *others = op.operands(call)
    tokens, state, history, sampling = (c.operand(x) for x in others[:4])
    best, token = _best_of_rows(c, request(penalties.penalised_candidates, MOST_CANDIDATES), logits, MOST_CANDIDATES,
                                [tokens, state, history, sampling])
    return [best, token, state, sampling]


def _select_candidates(c: ProgramContext, var: Expr, call: Expr) -> None:
    """The best logits of each row, then one walk over the rows."""
    logits, d2t, projected, block, state, sampling, predecessor, successor, count = op.operands(call)
    kept = op.scalar(count)
    tables = [c.weight(predecessor).format, c.weight(successor).format]
    ids, *others = flatten(c.result(var))
    start, first = split_offset(ids)
    c.launch(request(selector.select_candidates, kept, *tables), "selector walk", Units(1),
             [*_candidates(c, logits, d2t, kept),
              *(c.operand(x) for x in (projected, block, state, sampling, predecessor, successor)), start, *others,
              c.rows, int(op.shape(projected)[1]), first])


def _best_candidate(c: ProgramContext, var: Expr, call: Expr) -> None:
    logits, d2t, count = op.operands(call)
    kept = op.scalar(count)
    ids, confidence = flatten(c.result(var))
    start, first = split_offset(ids)
    c.launch(request(selector.best_candidate, kept), "best candidate", Units(c.rows),
             [*_candidates(c, logits, d2t, kept), start, confidence, first])


def _candidates(c: ProgramContext, logits: Expr, d2t: Sequence[Expr], kept: int) -> tuple[Operand, Operand]:
    """The `kept` best logits of each row, and their tokens."""
    best, token = _best_of_rows(c, request(candidates.top_candidates, kept), logits, kept, [])
    if not len(d2t):
        return best, token
    tokens = c.temporary(c.rows * kept * 4)
    look_up(c, token, d2t[0], tokens, c.rows * kept)
    return best, tokens


def _best_of_rows(c: ProgramContext, first: KernelRequest, logits: Expr, count: int,
                  others: Sequence[Operand]) -> tuple[Operand, Operand]:
    """The `count` best logits of each row and their ids. `first` finds those of each segment and reads `others` too."""
    vocabulary = int(op.shape(logits)[1])
    segments = candidates.segments_of(vocabulary)
    lists = [c.temporary(c.rows * segments * count * 4) for _ in range(2)]
    c.launch(first, "candidates", Units(c.rows * segments), [c.operand(logits), *others, *lists, vocabulary])
    if segments == 1:
        return lists[0], lists[1]
    best, token = (c.temporary(c.rows * count * 4) for _ in range(2))
    c.launch(request(candidates.merge_candidates, count), "candidates", Units(c.rows), [*lists, best, token, segments])
    return best, token


def _convolution_linear(traits: Traits, c: ProgramContext, var: Expr, call: Expr) -> None:
    u, x, w, base, _, form_text = op.operands(call)
    weight, (_, taps, columns), form = c.weight(w), map(int, op.shape(base)), op.scalar(form_text)
    group_size = 2 * taps * columns // weight.rows
    if convolution.matmul_passes(taps, group_size, form) > convolution.MOST_PASSES:
        raise BuildError(f"a convolution of {taps} taps in groups of {group_size} channels found; GPU targets take at "
                         f"most {16 * convolution.MOST_PASSES} weights for 32 channels: use target cpu")
    units = math.ceil(columns / (group_size * convolution.convolution_groups(taps, group_size, form)))
    share = share_of_matmul(traits, weight.format, c.rows)
    c.launch(request(convolution.convolution_matmul, weight.format, share, taps, group_size, form), weight.name,
             Units(units),
             [*c.operands(x), c.operand(u), c.operand(w), c.operand(base), *flatten(c.result(var)), columns],
             bytes_read=weight.bytes, flops=2 * c.rows * weight.rows * weight.columns)


def _norm_convolution(c: ProgramContext, var: Expr, call: Expr) -> None:
    x, z, dynamic, base, weight, epsilon, forms_text = op.operands(call)
    forms = tuple(filter(None, op.scalar(forms_text).split(",")))
    _, taps, columns = map(int, op.shape(base))
    group_size = taps * columns // int(op.shape(dynamic)[1])
    total, *normed = flatten(c.result(var))
    c.launch(request(convolution.norm_convolution, taps, group_size, forms), "norm", Units(c.rows),
             [*(c.operand(e) for e in (x, z, dynamic, base)), total, *(c.operand(w) for w in weight), *normed, columns,
              float(op.scalar(epsilon))])
