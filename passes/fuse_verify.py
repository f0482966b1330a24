"""FuseVerify: the target's taps leave in the form the drafter's fusion reads, and the injection takes them so.

`decode` returns the taps side by side as `features` instead of one by one; `inject` gets a parameter of that form in
place of float32 features and their quantisation. On the device nothing stands between the two any more.
"""

from __future__ import annotations

import tvm
from tvm import relax

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite

PARAMETER = "features"


def fuse_verify(module: tvm.IRModule) -> tvm.IRModule:
    """Does nothing to a module without `inject`. Runs after `choose_forms`, which decides the form."""
    functions = {v.name_hint: f for v, f in module.functions.items()}
    if "inject" not in functions:
        return module
    functions["inject"], form = _take_features(functions["inject"])
    functions["decode"] = _give_features(functions["decode"], form)
    result = tvm.IRModule(attrs=module.attrs)
    for name, function in functions.items():
        result[name] = function
    return result


def _take_features(inject: relax.Function) -> tuple[relax.Function, str]:
    """`inject` with features in the form that its fusion reads, and that form."""
    (parameter,) = (p for p in inject.params if p.name == PARAMETER)
    rows, columns = op.shape(parameter)
    forms = {op.scalar(op.operands(b.value)[1]) for b in inject.body.blocks[0].bindings
             if op.name_of(b.value) == "dflashc.quantise" and op.operands(b.value)[0].same_as(parameter)}
    form = forms.pop() if forms else "f32"
    replacement = relax.Var(PARAMETER, op.form_type(form, rows, int(columns)))

    def rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
        if op.name_of(value) == "dflashc.quantise" and op.operands(value)[0].same_as(parameter):
            return replacement
        return None

    return rewrite(inject, rule, {parameter: replacement}), form


def _give_features(decode: relax.Function, form: str) -> relax.Function:
    """`decode` returning (residual, features) instead of (residual, tap, …)."""

    def rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
        if not r.is_result(var) or not isinstance(value, relax.Tuple):
            return None
        residual, *taps = value.fields
        side_by_side = r.emit(op.features([r.new(t) for t in taps], form), PARAMETER)
        return relax.Tuple([r.new(residual), side_by_side])

    return rewrite(decode, rule)
