"""FuseDenoiseBlock: DFlash2's local convolutions fold into their neighbours.

The convolution before a sublayer joins the projection that makes its dynamic weights, and leaves in the form that the
sublayer reads; the one after it becomes `convolution_out`, which `fuse_norm` takes into the residual add. A version 1
drafter has none, and stays as the other passes have made it.
"""

from __future__ import annotations

import tvm
from tvm import relax

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module

_BEFORE, _AFTER = 0, 1  # sides of the convolution


def fuse_denoise_block(module: tvm.IRModule) -> tvm.IRModule:
    """Runs after `choose_forms`."""
    return rewrite_module(module, _rule)


def _rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
    """At a projection of dynamic weights, and at the convolution after the sublayer that shares them."""
    if _before(r, var) is not None:
        _fuse(r, var)
    elif op.name_of(value) == "dflashc.local_convolution":
        z, dynamic, base, _ = op.operands(value)
        if _before(r, dynamic) is not None:
            return op.convolution_out(r.new(z), r.new(dynamic), base)
    return None


def _before(r: Rewriter, dynamic: Expr) -> Expr | None:
    """The convolution of what `dynamic` projects, if `dynamic` serves that one and one after the sublayer alone."""
    if not r.is_call(dynamic, "dflashc.linear_group") or r.is_result(dynamic):
        return None
    inputs, weights, biases, _ = r.arguments(dynamic)
    if len(weights) != 1 or len(biases):
        return None
    users = r.users(dynamic)
    if not all(r.is_call(u, "dflashc.local_convolution") for u in users):
        return None
    sides = [op.scalar(r.arguments(u)[3]) for u in users]
    if sorted(sides) != [_BEFORE, _AFTER]:
        return None
    before = users[sides.index(_BEFORE)]
    projected = r.arguments(inputs[0])[0] if r.is_call(inputs[0], "dflashc.quantise") else inputs[0]
    return before if r.arguments(before)[0].same_as(projected) else None


def _fuse(r: Rewriter, dynamic: Expr) -> None:
    """The projection takes the convolution before the sublayer in, and leaves only the weights of the one after it."""
    (x,), (weight,), _, form = r.arguments(dynamic)
    before = _before(r, dynamic)
    u, _, base, _ = r.arguments(before)
    reader = r.users(before)[0] if r.used_once(before) else before
    quantised = r.is_call(reader, "dflashc.quantise")
    result = op.scalar(r.arguments(reader)[1]) if quantised else "f32"
    fused = r.emit(op.convolution_linear(r.new(u), r.new(x), weight, base, op.scalar(form), result), "convolution")
    r.replace(reader if quantised else before, r.emit(relax.TupleGetItem(fused, 0)))
    if quantised:
        r.replace(before, r.new(u))  # nobody reads the float32 result any more
    r.replace(dynamic, r.emit(relax.TupleGetItem(fused, 1), "dynamic"))
