"""FuseQuantise: gated units and attention hand over their result in the form its reader wants."""

from __future__ import annotations

import tvm

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module

_PRODUCERS = ("dflashc.gated_linear", "dflashc.gated", "dflashc.attention_block")


def fuse_quantise(module: tvm.IRModule) -> tvm.IRModule:
    return rewrite_module(module, _rule)


def _rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
    """At a producer whose only user is a `quantise`; the form is its last scalar."""
    if op.name_of(value) not in _PRODUCERS or not r.used_once(var):
        return None
    quantised = r.users(var)[0]
    if not r.is_call(quantised, "dflashc.quantise"):
        return None
    form = op.scalar(r.arguments(quantised)[1])
    *arguments, _ = op.operands(value)
    tensors = [r.new(a) for a in arguments if not op.is_scalar(a)]
    scalars = [op.scalar(a) for a in arguments if op.is_scalar(a)]
    name = op.name_of(value).removeprefix(op.PREFIX)
    rows, columns = op.shape(var)
    r.replace(quantised, r.emit(op.operator(name, tensors, [*scalars, form], op.form_type(form, rows, int(columns))),
                                quantised.name))
    r.replace(var, tensors[0])  # nobody else reads it
    return None
