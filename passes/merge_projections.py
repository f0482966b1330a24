"""MergeProjections: linears of one input become one, with their outputs side by side (Q, K and V; gate and up).

Biases move into the merged call. Afterwards every linear is a `linear_group`, of one weight or more.
"""

from __future__ import annotations

import tvm
from tvm import relax

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module


def merge_projections(module: tvm.IRModule) -> tvm.IRModule:
    return rewrite_module(module, _rule)


def _rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
    if op.name_of(value) != "dflashc.linear":
        return None
    x, _ = op.operands(value)
    biased = _bias(r, var) is not None
    group = [u for u in r.users(x) if r.is_call(u, "dflashc.linear") and (_bias(r, u) is not None) == biased]
    weights = [r.arguments(u)[1] for u in group]
    biases = [b for u in group if (b := _bias(r, u)) is not None]
    merged = r.emit(op.linear_group([r.new(x)], weights, biases, ["f32"]), "merged" if len(group) > 1 else var.name)
    outputs = [r.users(u)[0] if biased else u for u in group]
    if len(group) == 1:
        r.replace(outputs[0], merged)
    else:
        sizes = [int(op.shape(w)[0]) for w in weights]
        parts = r.emit(relax.op.split(merged, [sum(sizes[:i]) for i in range(1, len(sizes))], axis=-1))
        for index, output in enumerate(outputs):
            r.replace(output, r.emit(relax.TupleGetItem(parts, index), output.name))
    for u in group:  # a biased linear's own variable is gone: only its sum is used
        if u not in outputs:
            r.replace(u, merged)
    return None


def _bias(r: Rewriter, linear: Expr) -> Expr | None:
    """The bias parameter that the linear's only user adds, if that is what it does."""
    if not r.used_once(linear) or not r.is_call(r.users(linear)[0], "relax.add"):
        return None
    left, right = r.arguments(r.users(linear)[0])
    is_parameter = any(right.same_as(p) for p in r.function.params)
    return right if left.same_as(linear) and is_parameter and len(op.shape(right)) == 1 else None
