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
    if op.name_of(value) != "dflashc.local_convolution":
        return None
    x, dynamic, base, side = op.operands(value)
    if op.scalar(side) == _AFTER:
        return op.convolution_out(r.new(x), r.new(dynamic), base)
    if not r.is_call(dynamic, "dflashc.linear_group"):
        return None
    inputs, weights, biases, forms = r.arguments(dynamic)
    if len(weights) != 1 or len(biases):
        return None
    quantised = [u for u in r.users(var) if r.is_call(u, "dflashc.quantise")]
    single = len(r.users(var)) == 1 and len(quantised) == 1
    result = op.scalar(r.arguments(quantised[0])[1]) if single else "f32"
    fused = r.emit(op.convolution_linear(r.new(x), r.new(inputs[0]), weights[0], base, op.scalar(forms), result),
                   "convolution")
    r.replace(quantised[0] if single else var, r.emit(relax.TupleGetItem(fused, 0)))
    if single:
        r.replace(var, r.new(x))  # nobody reads the float32 result any more
    r.replace(dynamic, r.emit(relax.TupleGetItem(fused, 1), "dynamic"))
    return None
