"""Writes a model's graph in Relax, in the most readable form: per layer, per projection, unfused.

Three functions per model: `decode` (tokens to the residual stream, K/V caches updated on the way), `logits` and `ids`
(residual stream to logits, and on to their arg-max). Nothing about speed is decided here. Knows GGUF tensor names and
shapes, and no block format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx

from dflashc.compiler.gguf import GgufFile, GgufTensor
from dflashc.compiler.models.config import ModelConfig, Rope
from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.runtime.errors import BuildError


@dataclass
class Graph:
    """The function being written: its inputs so far, and shorthands for the operators.

    Shapes are checked when a weight is first named, so a wrong file fails with one line.

    Attributes
    ----------
    tensors : mapping
        The model's tensors by name.
    prefix : str
        Put in front of a tensor's name to make the parameter's, so that target and drafter can meet in one module.
    """

    tensors: Mapping[str, GgufTensor]
    config: ModelConfig
    prefix: str = ""
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)
    rows: tirx.Var = field(default_factory=lambda: tirx.Var("m", "int64"))
    context: tirx.Var = field(default_factory=lambda: tirx.Var("context", "int64"))
    parameters: dict[str, relax.Var] = field(default_factory=dict)

    def input(self, name: str, shape: tuple[object, ...], dtype: str) -> relax.Var:
        """A function parameter by name; the same name gives the same variable."""
        if name not in self.parameters:
            self.parameters[name] = relax.Var(name, relax.TensorType(shape, dtype))
        return self.parameters[name]

    def weight(self, name: str, *shape: int) -> relax.Var:
        """A weight by its GGUF name, of logical `shape`. Raises `BuildError` when it is missing or shaped otherwise."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise BuildError(f"tensor {name} not found; architecture {self.config.architecture} needs it")
        if tensor.shape != shape:
            raise BuildError(f"tensor {name} has shape {tensor.shape}; expected {shape}")
        return self.input(self.prefix + name, shape, "float32")

    def has(self, name: str) -> bool:
        return name in self.tensors

    def emit(self, value: Expr, name: str = "") -> relax.Var:
        return self.builder.emit(value, name_hint=name)

    def linear(self, x: Expr, name: str, rows: int, columns: int) -> Expr:
        """x times the weight `name`.weight, plus `name`.bias where the file has one."""
        y = self.emit(op.linear(x, self.weight(f"{name}.weight", rows, columns)), name.split(".")[-1])
        if self.has(f"{name}.bias"):
            y = self.emit(relax.op.add(y, self.weight(f"{name}.bias", rows)))
        return y

    def norm(self, x: Expr, name: str) -> Expr:
        return self.emit(op.rms_norm(x, self.weight(f"{name}.weight", op.shape(x)[-1]), self.config.epsilon))

    @property
    def tokens(self) -> relax.Var:
        return self.input("tokens", (self.rows,), "int32")

    @property
    def state(self) -> relax.Var:
        return self.input("state", (8,), "int64")

    def rope_table(self, rope: Rope, tokens: Expr | None = None) -> Expr:
        """Cosines and sines of the rows' positions; `tokens` gives the rows."""
        frequencies = self.input(frequencies_name(rope.name), (len(rope.frequencies),), "float64")
        rows = self.tokens if tokens is None else tokens
        return self.emit(op.rope_table(rows, self.state, frequencies, rope.magnitude), f"rope_{rope.name}")

    def cache(self, layer: int, which: str) -> relax.Var:
        c = self.config
        return self.input(cache_name(self.prefix, layer, which), (c.kv_heads, self.context, c.head_size), "float16")

    def add(self, x: Expr, y: Expr) -> Expr:
        return self.emit(relax.op.add(x, y))

    def attention(self, x: Expr, layer: int, table: Expr, mask: str = "causal") -> Expr:
        """Grouped-query attention of one layer, from its normed input (m, H) to the output projection (m, H).

        Per-head norms of Q and K, and attention sinks, take part where the file has their weights.
        """
        c = self.config
        blk = f"blk.{layer}"

        def heads(name: str, count: int) -> Expr:
            return self.emit(relax.op.reshape(self.linear(x, f"{blk}.{name}", count * c.head_size, c.hidden),
                                              (self.rows, count, c.head_size)))

        q, k, v = heads("attn_q", c.heads), heads("attn_k", c.kv_heads), heads("attn_v", c.kv_heads)
        if self.has(f"{blk}.attn_q_norm.weight"):
            q, k = self.norm(q, f"{blk}.attn_q_norm"), self.norm(k, f"{blk}.attn_k_norm")
        pairing = c.ropes[c.layer_ropes[layer]].pairing
        q, k = self.emit(op.rope(q, table, pairing)), self.emit(op.rope(k, table, pairing))
        sinks = f"{blk}.attn_sinks.weight"
        o = self.emit(op.attention(q, k, v, [self.weight(sinks, c.heads)] if self.has(sinks) else [],
                                   [self.cache(layer, "k"), self.cache(layer, "v")], self.state,
                                   c.layer_windows[layer], c.attention_scale, mask), f"attention_{layer}")
        o = self.emit(relax.op.reshape(o, (self.rows, c.heads * c.head_size)))
        return self.linear(o, f"{blk}.attn_output", c.hidden, c.heads * c.head_size)

    def gated_feed_forward(self, x: Expr, layer: int, activation: str) -> Expr:
        """down(activation(gate x) * up x), (m, H) to (m, H); `activation` is the name of one of Relax."""
        c = self.config
        blk = f"blk.{layer}"
        gate = self.linear(x, f"{blk}.ffn_gate", c.feed_forward, c.hidden)
        up = self.linear(x, f"{blk}.ffn_up", c.feed_forward, c.hidden)
        product = self.emit(relax.op.multiply(self.emit(getattr(relax.op.nn, activation)(gate)), up))
        return self.linear(product, f"{blk}.ffn_down", c.hidden, c.feed_forward)


def frequencies_name(rope: str) -> str:
    """Name of the table of frequencies of the rope named `rope` among the parameters."""
    return f"rope.{rope}.frequencies"


def cache_name(prefix: str, layer: int, which: str) -> str:
    """Name of a layer's "k" or "v" cache among the parameters."""
    return f"{prefix}cache.{layer}.{which}"


Layer = Callable[[Graph, Expr, int, Expr], Expr]
"""layer(graph, residual stream (m, H), layer number, rope table) -> residual stream."""


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
    module["decode"] = _decode(Graph(gguf.tensors, config), layer, taps)
    module["logits"] = _head(Graph(gguf.tensors, config), ids=False)
    module["ids"] = _head(Graph(gguf.tensors, config), ids=True)
    return module


def _decode(g: Graph, layer: Layer, taps: tuple[int, ...]) -> relax.Function:
    c = g.config

    def body() -> Expr:
        embedding = g.weight("token_embd.weight", c.vocabulary, c.hidden)
        x = g.emit(op.embed(g.tokens, embedding, c.embedding_scale), "residual")
        tables = [g.rope_table(r) for r in c.ropes]
        tapped = {}
        for number in range(c.layers):
            x = layer(g, x, number, tables[c.layer_ropes[number]])
            if number in taps:
                tapped[number] = x
        return relax.Tuple([x, *(tapped[t] for t in taps)])

    return function(g, body)


def _head(g: Graph, ids: bool) -> relax.Function:
    c = g.config

    def body() -> Expr:
        x = g.norm(g.input("hidden", (g.rows, c.hidden), "float32"), "output_norm")
        name = "output.weight" if g.has("output.weight") else "token_embd.weight"
        logits = g.emit(op.linear(x, g.weight(name, c.vocabulary, c.hidden)), "logits")
        if c.logit_softcap:
            logits = g.emit(op.softcap(logits, c.logit_softcap))
        return g.emit(op.argmax(logits), "ids") if ids else logits

    return function(g, body)


def function(g: Graph, body: Callable[[], Expr]) -> relax.Function:
    """A Relax function around `body`. Its parameters are known only afterwards, so it is put together by hand."""
    with g.builder.function("probe", []):
        with g.builder.dataflow():
            result = g.builder.emit_output(body())
        g.builder.emit_func_output(result)
    probe = g.builder.get()["probe"]
    return relax.Function(list(g.parameters.values()), probe.body, probe.ret_ty, is_pure=True)
