"""The target models (llama, qwen2, qwen3, gemma3) as one readable function over rows of tokens.

Knows nothing about files, drafting or speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.reference.config import ModelConfig, Weight, Weights
from tests.reference.functions import KvType, attention, gelu_tanh, quantise_activations, rms_norm, silu, softcap

ActivationQuantisation = Callable[[np.ndarray, str], np.ndarray]


def int8_activations(x: np.ndarray, weight_format: str) -> np.ndarray:
    """What a linear layer sees when its inputs are quantised: int8 per 256 before K-quants, per 32 before others."""
    if weight_format in ("F32", "F16", "BF16"):
        return x
    return quantise_activations(x, 256 if weight_format.endswith("_K") else 32)


class Linear:
    """x @ weight.T + bias, after an optional rounding of x that depends on the weight's format."""

    def __init__(self, activation_quantisation: ActivationQuantisation | None = None) -> None:
        self._quantisation = activation_quantisation

    def __call__(self, x: np.ndarray, weight: Weight, bias: Weight | None = None) -> np.ndarray:
        if self._quantisation is not None:
            x = self._quantisation(x, weight.format)
        y = x @ weight.values.T
        return y if bias is None else y + bias.values


class Cache:
    """Keys and values of each layer, rounded as `kv` says; writing at a position drops what follows."""

    def __init__(self, layers: int, kv: KvType | None = None) -> None:
        self._layers: list[tuple[np.ndarray, np.ndarray] | None] = [None] * layers
        self._kv = kv

    def extend(self, layer: int, start: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Store rows (rows, kv heads, d) at `start`..; return everything up to and including them."""
        stored = (self.rounded(keys), self.rounded(values))
        past = self._layers[layer]
        if past is not None:
            assert len(past[0]) >= start, f"the cache ends at {len(past[0])}, before position {start}"
            stored = (np.concatenate([past[0][:start], stored[0]]), np.concatenate([past[1][:start], stored[1]]))
        self._layers[layer] = stored
        return stored

    def read(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the committed positions, each (length, kv heads, d)."""
        stored = self._layers[layer]
        assert stored is not None, "nothing has been stored yet"
        return stored

    def query(self, x: np.ndarray) -> np.ndarray:
        """What the keys meet of queries (rows, heads, d)."""
        return x if self._kv is None else self._kv.query(x)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Keys or values as they are once stored."""
        return x if self._kv is None else self._kv.stored(x)


@dataclass(frozen=True)
class Result:
    """Logits (rows, vocabulary) and, per layer, the residual stream after it (rows, hidden)."""

    logits: np.ndarray
    taps: dict[int, np.ndarray]


class ReferenceModel:
    """A target model with its cache.

    Parameters
    ----------
    config, weights
        As read by `tests.reference.config`; the computation runs in the weights' dtype.
    kv
        How keys and values are stored; None keeps them as computed.
    activation_quantisation
        (x, weight format) -> rounded x, applied to the input of every linear layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv: KvType | None = None,
        activation_quantisation: ActivationQuantisation | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.linear = Linear(activation_quantisation)
        self.embedding = weights["token_embd.weight"]
        self.head = weights.get("output.weight", self.embedding)
        self._cache = Cache(config.layers, kv)

    def forward(self, tokens: Sequence[int], start_position: int) -> Result:
        """Run tokens at positions start_position..; whatever the cache held from there on is forgotten."""
        config = self.config
        x = self.embedding.values[np.asarray(tokens)] * config.embedding_scale
        positions = start_position + np.arange(len(tokens))
        taps = {}
        for layer in range(config.layers):
            normed = self._norm(x, layer, "attn_norm")
            x = x + self._post_norm(self._attention(normed, layer, positions), layer, "post_attention_norm")
            normed = self._norm(x, layer, "ffn_norm")
            x = x + self._post_norm(self._feed_forward(normed, layer), layer, "post_ffw_norm")
            taps[layer] = x
        normed = rms_norm(x, self.weights["output_norm.weight"].values, config.epsilon)
        return Result(softcap(self.linear(normed, self.head), config.logit_softcap), taps)

    def _attention(self, x: np.ndarray, layer: int, positions: np.ndarray) -> np.ndarray:
        config = self.config
        queries = self._project(x, layer, "attn_q").reshape(len(x), config.heads, config.head_size)
        keys = self._project(x, layer, "attn_k").reshape(len(x), config.kv_heads, config.head_size)
        values = self._project(x, layer, "attn_v").reshape(len(x), config.kv_heads, config.head_size)
        if f"blk.{layer}.attn_q_norm.weight" in self.weights:
            queries = self._norm(queries, layer, "attn_q_norm")
            keys = self._norm(keys, layer, "attn_k_norm")
        rope = config.rope[layer]
        queries, keys = rope(queries, positions), rope(keys, positions)
        keys, values = self._cache.extend(layer, int(positions[0]), keys, values)
        distance = positions[:, None] - np.arange(len(keys))
        visible = distance >= 0
        if config.sliding[layer]:
            visible &= distance < config.sliding_window
        mixed = attention(self._cache.query(queries), keys, values, visible, config.attention_scale)
        return self._project(mixed, layer, "attn_output")

    def _feed_forward(self, x: np.ndarray, layer: int) -> np.ndarray:
        activation = gelu_tanh if self.config.gelu else silu
        gated = activation(self._project(x, layer, "ffn_gate")) * self._project(x, layer, "ffn_up")
        return self._project(gated, layer, "ffn_down")

    def _project(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        prefix = f"blk.{layer}.{name}"
        return self.linear(x, self.weights[f"{prefix}.weight"], self.weights.get(f"{prefix}.bias"))

    def _norm(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        return rms_norm(x, self.weights[f"blk.{layer}.{name}.weight"].values, self.config.epsilon)

    def _post_norm(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        return self._norm(x, layer, name) if self.config.architecture == "gemma3" else x


def greedy(model: ReferenceModel, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens, each the lowest id among the largest logits."""
    result = model.forward(prompt, 0)
    tokens = [int(result.logits[-1].argmax())]
    while len(tokens) < count:
        result = model.forward(tokens[-1:], len(prompt) + len(tokens) - 1)
        tokens.append(int(result.logits[-1].argmax()))
    return tokens
