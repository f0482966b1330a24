"""FuseGatedUnit: gate and up projections, activation and product become one call.

`gated_linear` where both weights share a block format, so that one kernel reads both; otherwise the merged projection
stays and `gated` combines its halves.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module

_ACTIVATIONS = {"relax.nn.silu": "silu", "relax.nn.gelu_tanh": "gelu_tanh"}


def fuse_gated_unit(module: tvm.IRModule, formats: Mapping[str, str]) -> tvm.IRModule:
    """`formats`: block format by parameter name."""

    def rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
        """Matches multiply(activation(split(y)[0]), split(y)[1])."""
        if op.name_of(value) != "relax.multiply":
            return None
        activated, up = (r.value(a) for a in value.args)
        activation = _ACTIVATIONS.get(op.name_of(activated))
        if activation is None:
            return None
        gate = r.value(activated.args[0])
        halves = [gate, up]
        if not all(isinstance(h, relax.TupleGetItem) and r.is_call(h.tuple_value, "relax.split") for h in halves):
            return None
        if not gate.tuple_value.same_as(up.tuple_value) or (gate.index, up.index) != (0, 1):
            return None
        merged = r.arguments(gate.tuple_value)[0]
        if not r.is_call(merged, "dflashc.linear_group"):
            return None
        (x,), weights, biases, _ = r.arguments(merged)
        if len(weights) != 2:
            return None  # the split has further parts
        if not len(biases) and formats[weights[0].name] == formats[weights[1].name]:
            return op.gated_linear(r.new(x), weights[0], weights[1], activation, "f32", "f32")
        return op.gated(r.new(merged), activation, "f32")

    return rewrite_module(module, rule)
