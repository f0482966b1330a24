"""Writes a model's graph in Relax.

Three functions per model: `decode` (tokens to the residual stream, K/V caches updated on the way), `logits` and `ids`
(residual stream to logits, and on to their arg-max). Knows nothing of architectures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from dflashc.compiler.gguf import GgufFile
from dflashc.compiler.models.config import ModelConfig
from dflashc.compiler.models.graph import Expr, Graph, Layer, decode, head
from dflashc.passes import operators as op
from dflashc.runtime.errors import BuildError

_RELAX = {"add": relax.op.add, "multiply": relax.op.multiply, "reshape": relax.op.reshape,
          "silu": relax.op.nn.silu, "gelu_tanh": relax.op.nn.gelu_tanh}


@dataclass
class RelaxGraph(Graph):
    """A Relax function being written; `parameters` are its inputs so far."""

    rows: Any = field(default_factory=lambda: tirx.Var("m", "int64"))
    context: Any = field(default_factory=lambda: tirx.Var("context", "int64"))
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)
    parameters: dict[str, relax.Var] = field(default_factory=dict)

    def input(self, name: str, shape: tuple[object, ...], dtype: str) -> relax.Var:
        if name not in self.parameters:
            self.parameters[name] = relax.Var(name, relax.TensorType(shape, dtype))
        return self.parameters[name]

    def call(self, operator: str, *arguments: Any, name: str = "") -> relax.Var:
        constructor = _RELAX.get(operator) or getattr(op, operator)
        return self.builder.emit(constructor(*arguments), name_hint=name)


def decoder(gguf: GgufFile, config: ModelConfig, layer: Layer, taps: tuple[int, ...]) -> tvm.IRModule:
    """The module of a decoder: `decode`, `logits` and `ids`.

    Parameters
    ----------
    layer : callable
        Writes one layer.
    taps : tuple of int
        Layers (0-based) after which the residual stream is also returned, in this order.

    Returns
    -------
    IRModule
        `decode(tokens (m,) int32, state, weights…, caches…) -> (residual (m, H), taps…)` and
        `logits(hidden (m, H), weights…) -> (m, V)`, and `ids`, which goes on to the arg-max, int32 (m,).
    """
    for tap in taps:
        if not 0 <= tap < config.layers:
            raise BuildError(f"tap after layer {tap} asked for; the target has layers 0 to {config.layers - 1}")
    module = tvm.IRModule()
    module["decode"] = function(RelaxGraph(gguf.tensors, config), lambda g: decode(g, layer, taps))
    module["logits"] = function(RelaxGraph(gguf.tensors, config), head)
    module["ids"] = function(RelaxGraph(gguf.tensors, config), lambda g: g.call("argmax", head(g), name="ids"))
    return module


def function(g: RelaxGraph, body: Callable[[RelaxGraph], Expr | list[Expr]]) -> relax.Function:
    """A Relax function around `body`, whose list becomes a tuple.

    Its parameters are known only afterwards, so it is put together by hand.
    """
    with g.builder.function("probe", []):
        with g.builder.dataflow():
            returned = body(g)
            result = g.builder.emit_output(relax.Tuple(returned) if isinstance(returned, list) else returned)
        g.builder.emit_func_output(result)
    probe = g.builder.get()["probe"]
    return relax.Function(list(g.parameters.values()), probe.body, probe.ret_ty, is_pure=True)
