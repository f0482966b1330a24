"""FuseKVInjection: fused features to the K and V of every drafter layer, one call whatever their number.

Taps, fusion and its norm stay a linear and a norm; all layers' projections, head norms, rope and cache writes become
`kv_injection`. From 2 + 5 Ld calls to 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module


def fuse_kv_injection(module: tvm.IRModule) -> tvm.IRModule:
    return rewrite_module(module, _rule)


@dataclass(frozen=True)
class _Write:
    """One layer's cache write, traced back to the merged projection."""

    merged: Expr
    parts: tuple[int, int]
    norm: Expr
    epsilon: float
    table: Expr
    pairing: str
    caches: tuple[Expr, Expr]
    state: Expr
    heads: tuple[int, int]


def _rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
    """At the first cache write: all writes of the function, if they are one drafter's."""
    if op.name_of(value) != "dflashc.cache_write":
        return None
    variables = [v for v, e in r.bindings if op.name_of(e) == "dflashc.cache_write"]
    writes = [w for v in variables if (w := _trace(r, v)) is not None]
    first = writes[0] if writes else None
    if first is None or len(writes) != len(variables) or not all(_alike(w, first) for w in writes):
        return None
    if [p for w in writes for p in w.parts] != list(range(2 * len(writes))):
        return None
    (x,), weights, biases, _ = r.arguments(first.merged)
    if len(weights) != 2 * len(writes) or any(op.shape(w)[0] != first.heads[0] * first.heads[1] for w in weights):
        return None
    fused = r.emit(op.kv_injection([r.new(x)], list(weights), list(biases), [w.norm for w in writes],
                                   r.new(first.table), [c for w in writes for c in w.caches], first.state,
                                   *first.heads, first.pairing, first.epsilon, ["f32"]), "injected")
    for variable in variables:
        r.replace(variable, fused)
    return None


def _alike(a: _Write, b: _Write) -> bool:
    """Whether two layers differ in nothing but their weights and caches."""
    same = all(x.same_as(y) for x, y in ((a.merged, b.merged), (a.table, b.table), (a.state, b.state)))
    return same and (a.epsilon, a.pairing, a.heads) == (b.epsilon, b.pairing, b.heads)


def _trace(r: Rewriter, var: Expr) -> _Write | None:
    """Matches cache_write(rope(rms_norm(reshape(split(merged)[i]))), reshape(split(merged)[j]), …)."""
    k, v, k_cache, v_cache, state = r.arguments(var)
    if not r.is_call(k, "dflashc.rope"):
        return None
    normed, table, pairing = r.arguments(k)
    if not r.is_call(normed, "dflashc.rms_norm"):
        return None
    k_input, norm, epsilon = r.arguments(normed)
    k_part, v_part = r.split_part(k_input), r.split_part(v)
    if k_part is None or v_part is None or not k_part[0].same_as(v_part[0]):
        return None
    if not r.is_call(k_part[0], "dflashc.linear_group"):
        return None
    heads = (int(op.shape(k)[1]), int(op.shape(k)[2]))
    return _Write(k_part[0], (k_part[1], v_part[1]), norm, op.scalar(epsilon), table, op.scalar(pairing),
                  (k_cache, v_cache), state, heads)
