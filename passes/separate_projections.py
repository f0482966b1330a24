"""SeparateProjections: merged linears that no fusion has taken together go apart again.

A merged projection that is still split into its parts would have to be copied apart on the device.
"""

from __future__ import annotations

import tvm
from tvm import relax

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module


def separate_projections(module: tvm.IRModule) -> tvm.IRModule:
    return rewrite_module(module, _rule)


def _rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
    """At a split of a `linear_group` into its weights' outputs."""
    if op.name_of(value) != "relax.split" or not r.is_call(value.args[0], "dflashc.linear_group"):
        return None
    (x,), weights, biases, _ = r.arguments(value.args[0])
    items = [(u, r.value(u)) for u in r.users(var)]
    if r.is_result(var) or not all(isinstance(item, relax.TupleGetItem) for _, item in items):
        return None
    if [int(part.shape.values[-1]) for part in var.ty.fields] != [op.shape(w)[0] for w in weights]:
        return None
    for user, item in items:
        bias = [biases[item.index]] if len(biases) else []
        r.replace(user, r.emit(op.linear_group([r.new(x)], [weights[item.index]], bias, ["f32"]), user.name))
    r.replace(var, r.new(value.args[0]))  # nobody splits it any more
    return None
