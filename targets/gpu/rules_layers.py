"""How a GPU runs what stands between the matmuls of a layer: embedding, norms, rope, attention, activation forms."""

from __future__ import annotations

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.runtime.plan import Buffer, Operand, Units
from dflashc.targets.context import ProgramContext, Rule, flatten
from dflashc.targets.gpu.kernels import activation, attention, attention_merge, elementwise, embedding, norm, rope
from dflashc.targets.gpu.kernels.activation import spans
from dflashc.targets.gpu.kernels.row_groups import MOST_ROWS
from dflashc.targets.gpu.requests import check_heads
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.requests import KernelRequest, request

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu"}

_ATTENDED_AT_ONCE = 64
"""Rows that attend in one launch: prefill programs have more, and the scratch of their slots grows with them."""


def layer_rules(traits: Traits) -> dict[str, Rule]:
    """The rules for a GPU family, by operator."""

    def attention_block(c: ProgramContext, var: Expr, call: Expr) -> None:
        _attention_block(traits, c, var, call)

    return {"dflashc.embed": _embed, "dflashc.rope_table": _rope_table, "dflashc.norm": _norm,
            "dflashc.quantise": _quantise, "dflashc.features": _features, "dflashc.gated": _gated,
            "dflashc.scale": _elementwise, "dflashc.softcap": _elementwise,
            "dflashc.attention_block": attention_block}


def _embed(c: ProgramContext, var: Expr, call: Expr) -> None:
    tokens, table, scale = op.operands(call)
    weight = c.weight(table)
    c.launch(request(embedding.embed, weight.format), "embedding",
             Units(c.rows * embedding.embed_groups(weight.columns)),
             [c.operand(tokens), c.operand(table), *flatten(c.result(var)), weight.columns, float(op.scalar(scale))])


def _rope_table(c: ProgramContext, var: Expr, call: Expr) -> None:
    _, state, frequencies, magnitude = op.operands(call)
    pairs = int(op.shape(frequencies)[0])
    c.launch(request(rope.rope_table), "rope table", Units(rope.rope_groups(c.rows, pairs)),
             [c.operand(state), c.operand(frequencies), *flatten(c.result(var)), c.rows, pairs,
              float(op.scalar(magnitude))],
             barrier=False)  # the embedding comes next and needs none of it


def _norm(c: ProgramContext, var: Expr, call: Expr) -> None:
    x, delta, post_weight, weight, epsilon, forms_text = op.operands(call)
    forms = tuple(filter(None, op.scalar(forms_text).split(",")))
    result = c.result(var)
    assert isinstance(result, list)
    operands: list[Operand | int | float] = [c.operand(x)]
    if len(delta):
        operands += [c.operand(delta[0]), *flatten(result[0])]
    else:
        result[0] = c.operand(x)
    operands += [c.operand(w) for w in (*post_weight, *weight)]
    case = (bool(len(delta)), bool(len(post_weight)), forms)
    c.launch(KernelRequest(norm.norm_name(*case), norm.norm, case), "norm", Units(c.rows),
             [*operands, *flatten(result[1:]), int(op.shape(x)[1]), float(op.scalar(epsilon))])


def _quantise(c: ProgramContext, var: Expr, call: Expr) -> None:
    x, form = op.operands(call)
    columns = int(op.shape(x)[1])
    c.launch(request(activation.quantise, op.scalar(form)), "quantise", Units(c.rows * spans(columns)),
             [c.operand(x), *flatten(c.result(var)), columns, columns, 0])


def _features(c: ProgramContext, var: Expr, call: Expr) -> None:
    """A launch per tap, side by side."""
    taps, form = op.operands(call)
    outputs = flatten(c.result(var))
    leading, column = sum(int(op.shape(t)[1]) for t in taps), 0
    for index, tap in enumerate(taps):
        columns = int(op.shape(tap)[1])
        c.launch(request(activation.quantise, op.scalar(form)), "features", Units(c.rows * spans(columns)),
                 [c.operand(tap), *outputs, columns, leading, column], barrier=index == len(taps) - 1)
        column += columns


def _gated(c: ProgramContext, var: Expr, call: Expr) -> None:
    y, act, form = op.operands(call)
    columns = int(op.shape(y)[1]) // 2
    c.launch(request(elementwise.gated, ACTIVATIONS[op.scalar(act)], op.scalar(form)), "gated unit",
             Units(c.rows * spans(columns)), [c.operand(y), *flatten(c.result(var)), columns])


def _elementwise(c: ProgramContext, var: Expr, call: Expr) -> None:
    """`scale` and `softcap`."""
    x, scalar = op.operands(call)
    name = op.name_of(call).removeprefix(op.PREFIX)
    count = c.rows * int(op.shape(x)[1])
    c.launch(request(getattr(elementwise, name)), name, Units(spans(count)),
             [c.operand(x), *flatten(c.result(var)), count, float(op.scalar(scalar))])


def _attention_block(traits: Traits, c: ProgramContext, var: Expr, call: Expr) -> None:
    """Verify programs: one launch for norms, rope, cache write and attention by slots, and one that merges the slots.

    Prefill programs write the cache first, in a launch of its own of the same kernel, and attend some rows at a time.
    """
    qkv, norms, sinks, table, keys, values, state, *scalars = op.operands(call)
    query_heads, kv_heads, size, pairing, window, scale, mask, epsilon, form = (op.scalar(s) for s in scalars)
    kv = c.cache(keys).type
    check_heads("attention", size, kv, attention.MOST_SIZE)
    normed, group = len(norms) > 0, query_heads // kv_heads
    label = keys.name.removesuffix(".k").replace("cache.", "blk.")
    outputs = flatten(c.result(var))
    at_once = min(c.rows, _ATTENDED_AT_ONCE)
    partial_values, partial_sums = (
        c.share(Buffer(f"attention.{name}", "scratch", traits.attention_slots * at_once * query_heads * floats * 4))
        for name, floats in (("values", size), ("sums", 2)))
    seen = [window, int(mask == "block")]

    def attend(stored: int, first_row: int, attended: int) -> None:
        chunks = attention.query_chunks(attended, group) if attended else attention.store_chunks(stored)
        c.launch(request(attention.attention, size, pairing, normed, kv),
                 f"{label} {'attention' if attended else 'cache write'}",
                 Units(kv_heads * traits.attention_slots * chunks),
                 [c.operand(state), c.operand(qkv), c.operand(table), *(c.operand(w) for w in norms), c.operand(keys),
                  c.operand(values), partial_values, partial_sums, c.rows, stored, first_row, attended, chunks, group,
                  kv_heads, c.cache(keys).capacity, *seen, int(op.shape(table)[2]), float(scale),
                  *([float(epsilon)] if normed else [])])

    def merge(first_row: int, attended: int) -> None:
        c.launch(request(attention_merge.attention_merge, form, "sinks" if len(sinks) else "keys"),
                 f"{label} attention merge", Units(attended * spans(query_heads * size)),
                 [c.operand(state), partial_values, partial_sums, *(c.operand(s) for s in sinks), *outputs, c.rows,
                  first_row, attended, query_heads, size, *seen])

    if c.rows <= MOST_ROWS:
        attend(c.rows, 0, c.rows)
        merge(0, c.rows)
        return
    attend(c.rows, 0, 0)
    for first_row in range(0, c.rows, at_once):
        attend(0, first_row, min(at_once, c.rows - first_row))
        merge(first_row, min(at_once, c.rows - first_row))
