"""FuseArgmax: the output head and its arg-max become one call, so that greedy decoding never writes logits.

A softcap in between is dropped: it is monotone.
"""

from __future__ import annotations

import tvm

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module


def fuse_argmax(module: tvm.IRModule) -> tvm.IRModule:
    return rewrite_module(module, _rule)


def _rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
    if op.name_of(value) != "dflashc.argmax":
        return None
    logits = op.operands(value)[0]
    if r.is_call(logits, "dflashc.softcap"):
        logits = r.arguments(logits)[0]
    if not r.is_call(logits, "dflashc.linear_group"):
        return None
    (x,), weights, biases, _ = r.arguments(logits)
    return op.linear_argmax(r.new(x), weights[0], "f32") if len(weights) == 1 and not len(biases) else None
