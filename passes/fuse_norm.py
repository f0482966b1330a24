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
    if _is_residual_add(value):
        x, delta = op.operands(value)
        post = delta if _is_post_norm(r, delta) else None
        normed = [u for u in r.users(var) if _is_pre_norm(r, u)
                  and (post is None or _epsilon(r, u) == _epsilon(r, post))]
        norms = [*normed[:1], *([] if post is None else [post])]
        delta, post_weight = (delta, None) if post is None else r.arguments(post)[:2]
        _emit(r, var, r.new(x), r.new(delta), post_weight, normed[0] if normed else None,
              _epsilon(r, norms[0]) if norms else 0.0)
    elif _is_pre_norm(r, var):
        _emit(r, None, r.new(op.operands(value)[0]), None, None, var, _epsilon(r, var))
    return None


def _epsilon(r: Rewriter, norm: Expr) -> float:
    return op.scalar(r.arguments(norm)[2])


def _is_residual_add(value: Expr) -> bool:
    """Whether two matrices are added; a bias that no linear took in is a vector."""
    return op.name_of(value) == "relax.add" and all(len(op.shape(a)) == 2 for a in value.args)


def _is_norm(r: Rewriter, var: Expr) -> bool:
    """Whether `var` is a norm of whole rows, not of heads."""
    return r.is_call(var, "dflashc.rms_norm") and len(op.shape(var)) == 2


def _is_post_norm(r: Rewriter, var: Expr) -> bool:
    """Whether `var` is a norm whose only use is to be added to the residual stream."""
    if not _is_norm(r, var) or not r.used_once(var):
        return False
    user = r.value(r.users(var)[0])
    return _is_residual_add(user) and user.args[1].same_as(var)


def _is_pre_norm(r: Rewriter, var: Expr) -> bool:
    return _is_norm(r, var) and not _is_post_norm(r, var)


def _emit(r: Rewriter, total: Expr | None, x: Expr, delta: Expr | None, post_weight: Expr | None, normed: Expr | None,
          epsilon: float) -> None:
    """Emit the fused call; let its parts stand for the sum `total`, the norm `normed` and its quantised forms."""
    quantised = {} if normed is None else {u: op.scalar(r.arguments(u)[1]) for u in r.users(normed)
                                           if r.is_call(u, "dflashc.quantise")}
    forms = list(dict.fromkeys(quantised.values()))
    if normed is not None and (len(quantised) < len(r.users(normed)) or r.is_result(normed)):
        forms.append("f32")
    weight = r.arguments(normed)[1] if forms else None
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
