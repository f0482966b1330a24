"""What a model's graph is made of, in the most readable form: per layer, per projection, unfused.

Owns the parts that architectures share, and which tensors they read, of which shapes. Where the graph goes is a
subclass's affair: `relax_graph` writes it in Relax, `tensor_list` only notes the tensors. Nothing about speed is
decided here. Knows GGUF tensor names, no block format, and imports no TVM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from dflashc.compiler.gguf import GgufTensor
from dflashc.compiler.models.config import ModelConfig, Rope
from dflashc.runtime.device_sampling import Word
from dflashc.runtime.errors import BuildError

Expr: TypeAlias = Any
"""A value of the graph."""


@dataclass
class Graph(ABC):
    """The function being written: shorthands for operators, and the weights by name.

    Shapes are checked when a weight is first named, so a wrong file fails with one line.

    Attributes
    ----------
    tensors : mapping
        The model's tensors by name.
    prefix : str
        Put in front of a tensor's name to make the parameter's, so that target and drafter can meet in one module.
    rows, context :
        The symbolic numbers of rows (m) and of tokens that the caches hold.
    """

    tensors: Mapping[str, GgufTensor]
    config: ModelConfig
    prefix: str = ""
    rows: Any = None
    context: Any = None

    @abstractmethod
    def input(self, name: str, shape: tuple[object, ...], dtype: str) -> Expr:
        """A function parameter by name; the same name gives the same value."""

    @abstractmethod
    def call(self, operator: str, *arguments: Any, name: str = "") -> Expr:
        """An operator of `passes.operators`, or Relax's add, multiply, reshape, silu or gelu_tanh."""

    def weight(self, name: str, *shape: int) -> Expr:
        """A weight by its GGUF name, of logical `shape`. Raises `BuildError` when it is missing or shaped otherwise."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise BuildError(f"tensor {name} not found; architecture {self.config.architecture} needs it")
        if tensor.shape != shape:
            raise BuildError(f"tensor {name} has shape {tensor.shape}; expected {shape}")
        return self.input(self.prefix + name, shape, "float32")

    def has(self, name: str) -> bool:
        return name in self.tensors

    def linear(self, x: Expr, name: str, rows: int, columns: int) -> Expr:
        """x times the weight `name`.weight, plus `name`.bias where the file has one."""
        y = self.call("linear", x, self.weight(f"{name}.weight", rows, columns), name=name.split(".")[-1])
        return self.add(y, self.weight(f"{name}.bias", rows)) if self.has(f"{name}.bias") else y

    def norm(self, x: Expr, name: str, size: int | None = None) -> Expr:
        """RMS norm over the last axis, of the hidden size unless `size` says otherwise."""
        weight = self.weight(f"{name}.weight", self.config.hidden if size is None else size)
        return self.call("rms_norm", x, weight, self.config.epsilon)

    @property
    def tokens(self) -> Expr:
        return self.input("tokens", (self.rows,), "int32")

    @property
    def state(self) -> Expr:
        return self.input("state", (8,), "int64")

    @property
    def sampling(self) -> Expr:
        return self.input("sampling", (len(Word),), "int64")

    def rope_table(self, rope: Rope, tokens: Expr | None = None) -> Expr:
        """Cosines and sines of the rows' positions; `tokens` gives the rows."""
        frequencies = self.input(frequencies_name(rope.name), (len(rope.frequencies),), "float64")
        rows = self.tokens if tokens is None else tokens
        return self.call("rope_table", rows, self.state, frequencies, rope.magnitude, name=f"rope_{rope.name}")

    def cache(self, layer: int, which: str) -> Expr:
        c = self.config
        return self.input(cache_name(self.prefix, layer, which), (c.kv_heads, self.context, c.head_size), "float16")

    def add(self, x: Expr, y: Expr) -> Expr:
        return self.call("add", x, y)

    def attention(self, x: Expr, layer: int, table: Expr, mask: str = "causal") -> Expr:
        """Grouped-query attention of one layer, from its normed input (m, H) to the output projection (m, H).

        Per-head norms of Q and K, and attention sinks, take part where the file has their weights.
        """
        c = self.config
        blk = f"blk.{layer}"
        q, k, v = (self.heads(x, f"{blk}.attn_{which}", count)
                   for which, count in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)))
        if self.has(f"{blk}.attn_q_norm.weight"):
            q, k = (self.norm(y, f"{blk}.attn_{which}_norm", c.head_size) for y, which in ((q, "q"), (k, "k")))
        pairing = c.ropes[c.layer_ropes[layer]].pairing
        q, k = self.call("rope", q, table, pairing), self.call("rope", k, table, pairing)
        sinks = f"{blk}.attn_sinks.weight"
        o = self.call("attention", q, k, v, [self.weight(sinks, c.heads)] if self.has(sinks) else [],
                      [self.cache(layer, "k"), self.cache(layer, "v")], self.state, c.layer_windows[layer],
                      c.attention_scale, mask, name=f"attention_{layer}")
        o = self.call("reshape", o, (self.rows, c.heads * c.head_size))
        return self.linear(o, f"{blk}.attn_output", c.hidden, c.heads * c.head_size)

    def heads(self, x: Expr, name: str, count: int) -> Expr:
        """A projection (m, H) to `count` heads, (m, count, D)."""
        c = self.config
        return self.call("reshape", self.linear(x, name, count * c.head_size, c.hidden),
                         (self.rows, count, c.head_size))

    def gated_feed_forward(self, x: Expr, layer: int, activation: str) -> Expr:
        """down(activation(gate x) * up x), (m, H) to (m, H); `activation` is "silu" or "gelu_tanh"."""
        c = self.config
        blk = f"blk.{layer}"
        gate = self.linear(x, f"{blk}.ffn_gate", c.feed_forward, c.hidden)
        up = self.linear(x, f"{blk}.ffn_up", c.feed_forward, c.hidden)
        product = self.call("multiply", self.call(activation, gate), up)
        return self.linear(product, f"{blk}.ffn_down", c.hidden, c.feed_forward)


def frequencies_name(rope: str) -> str:
    """Name of the table of frequencies of the rope named `rope` among the parameters."""
    return f"rope.{rope}.frequencies"


def cache_name(prefix: str, layer: int, which: str) -> str:
    """Name of a layer's "k" or "v" cache among the parameters."""
    return f"{prefix}cache.{layer}.{which}"


Layer = Callable[[Graph, Expr, int, Expr], Expr]
"""layer(graph, residual stream (m, H), layer number, rope table) -> residual stream."""


def decode(g: Graph, layer: Layer, taps: tuple[int, ...]) -> list[Expr]:
    """Tokens to the residual stream (m, H), and to what it is after each of the layers `taps`."""
    c = g.config
    embedding = g.weight("token_embd.weight", c.vocabulary, c.hidden)
    x = g.call("embed", g.tokens, embedding, c.embedding_scale, name="residual")
    tables = [g.rope_table(r) for r in c.ropes]
    tapped = {}
    for number in range(c.layers):
        x = layer(g, x, number, tables[c.layer_ropes[number]])
        if number in taps:
            tapped[number] = x
    return [x, *(tapped[t] for t in taps)]


def head(g: Graph) -> Expr:
    """Residual stream to logits (m, V)."""
    c = g.config
    x = g.norm(g.input("hidden", (g.rows, c.hidden), "float32"), "output_norm")
    name = "output.weight" if g.has("output.weight") else "token_embd.weight"
    logits = g.call("linear", x, g.weight(name, c.vocabulary, c.hidden), name="logits")
    return g.call("softcap", logits, c.logit_softcap) if c.logit_softcap else logits
