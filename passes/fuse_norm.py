"""FuseNorm: residual add, norm after the sublayer, norm before the next one and quantisation become one `norm`.

Where the sublayer ends with DFlash2's convolution, that takes part too (`norm_convolution`).
"""

from __future__ import annotations

from collections.abc import Callable

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
        epsilon = _epsilon(r, norms[0]) if norms else 0.0

        def fused(weight: Expr | None, forms: list[str]) -> Expr:
            if post is None and r.is_call(delta, "dflashc.convolution_out") and r.used_once(delta):
                z, dynamic, base = r.arguments(delta)
                return op.norm_convolution(r.new(x), r.new(z), r.new(dynamic), base, weight, epsilon, forms)
            return op.norm(r.new(x), r.new(delta), post_weight, weight, epsilon, forms)

        _emit(r, fused, var, normed[0] if normed else None)
    elif _is_pre_norm(r, var):
        x, epsilon = r.new(op.operands(value)[0]), _epsilon(r, var)
        _emit(r, lambda weight, forms: op.norm(x, None, None, weight, epsilon, forms), None, var)
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


def _emit(r: Rewriter, fused: Callable[[Expr | None, list[str]], Expr], total: Expr | None,
          normed: Expr | None) -> None:
    """Emit `fused(weight, forms)`; its parts stand for the sum `total`, the norm `normed` and its quantised forms."""
    quantised = {} if normed is None else {u: op.scalar(r.arguments(u)[1]) for u in r.users(normed)
                                           if r.is_call(u, "dflashc.quantise")}
    forms = list(dict.fromkeys(quantised.values()))
    if normed is not None and (len(quantised) < len(r.users(normed)) or r.is_result(normed)):
        forms.append("f32")
    results = r.emit(fused(r.arguments(normed)[1] if forms else None, forms), "norm")
    if total is not None:
        r.replace(total, r.emit(relax.TupleGetItem(results, 0), total.name))
    for index, form in enumerate(forms):
        part = r.emit(relax.TupleGetItem(results, index + 1))
        for user in [u for u, f in quantised.items() if f == form]:
            r.replace(user, part)
        if form == "f32":
            r.replace(normed, part)
    if normed is not None and "f32" not in forms:
        r.replace(normed, results)  # nobody reads the norm itself any more
