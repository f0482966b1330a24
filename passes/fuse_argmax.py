"""FuseArgmax: the output head and its arg-max become one call, so that greedy decoding never writes logits.

A softcap in between is dropped: it is monotone. What a reduced vocabulary makes of the arg-max is looked up on the way.
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
    if len(weights) != 1 or len(biases):
        return None
    reader = r.users(var)[0] if r.used_once(var) else var
    if not r.is_call(reader, "dflashc.look_up") or not r.arguments(reader)[0].same_as(var):
        return op.linear_argmax(r.new(x), weights[0], [], "f32")
    fused = r.emit(op.linear_argmax(r.new(x), weights[0], [r.arguments(reader)[1]], "f32"), reader.name)
    r.replace(reader, fused)
    r.replace(var, fused)  # nobody else reads it
    return None
