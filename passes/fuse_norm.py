"""FuseNorm: residual add, norm after the sublayer, norm before the next one and quantisation become one `norm`."""

from __future__ import annotations

import tvm
from tvm import relax

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module


def fuse_norm(module: tvm.IRModule) -> tvm.IRModule:
    return rewrite_module(module, _rule)


def _rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
    name = op.name_of(value)
    if name == "relax.add" and len(op.shape(var)) == 2:
        x, delta = op.operands(value)
        post_weight = None
        if r.is_call(delta, "dflashc.rms_norm") and r.used_once(delta):
            delta, post_weight, _ = r.arguments(delta)
        normed = [u for u in r.users(var) if r.is_call(u, "dflashc.rms_norm")]
        _emit(r, var, r.new(x), r.new(delta), post_weight, normed[0] if normed else None, _epsilon(r, value, normed))
    elif name == "dflashc.rms_norm" and len(op.shape(var)) == 2 and not _is_post_norm(r, var):
        _emit(r, None, r.new(op.operands(value)[0]), None, None, var, op.scalar(op.operands(value)[2]))
    return None


def _epsilon(r: Rewriter, add: Expr, normed: list[Expr]) -> float:
    """The epsilon of whichever norm takes part; all norms of a model share it."""
    for norm in [*normed, op.operands(add)[1]]:
        if r.is_call(norm, "dflashc.rms_norm"):
            return op.scalar(r.arguments(norm)[2])
    return 0.0


def _is_post_norm(r: Rewriter, var: Expr) -> bool:
    """Whether a norm's only use is to be added to the residual stream."""
    return r.used_once(var) and r.is_call(r.users(var)[0], "relax.add") and r.arguments(r.users(var)[0])[1].same_as(var)


def _emit(r: Rewriter, total: Expr | None, x: Expr, delta: Expr | None, post_weight: Expr | None, normed: Expr | None,
          epsilon: float) -> None:
    """Emit the fused call; let its parts stand for the sum `total`, the norm `normed` and its quantised forms."""
    quantised = {} if normed is None else {u: op.scalar(r.arguments(u)[1]) for u in r.users(normed)
                                           if r.is_call(u, "dflashc.quantise")}
    forms = list(dict.fromkeys(quantised.values()))
    if normed is not None and len(quantised) < len(r.users(normed)):
        forms.append("f32")
    weight = None if normed is None else r.arguments(normed)[1]
    fused = r.emit(op.norm(x, delta, post_weight, weight, epsilon, forms), "norm")
    if total is not None:
        r.replace(total, r.emit(relax.TupleGetItem(fused, 0), total.name))
    for index, form in enumerate(forms):
        part = r.emit(relax.TupleGetItem(fused, index + 1))
        for user in [u for u, f in quantised.items() if f == form]:
            r.replace(user, part)
        if form == "f32":
            r.replace(normed, part)
    if normed is not None and "f32" not in forms:
        r.replace(normed, x)  # nobody reads the norm itself any more
