"""The DFlash drafters (v1, and v2 with convolutions and selector) and the greedy round of speculation.

The drafter shares embedding and head with its target unless its file has them. Knows nothing about files or speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.reference.config import DrafterConfig, Weights
from tests.reference.functions import KvType, Rope, attention, rms_norm, silu, softcap, softmax
from tests.reference.transformer import ActivationQuantisation, Cache, Linear, ReferenceModel, Result


class ReferenceDrafter:
    """A drafter with its cache of injected keys and values.

    Parameters
    ----------
    config, weights
        As read by `tests.reference.config.read_drafter`.
    target
        Lends its embedding and head where the drafter has none.
    kv, activation_quantisation
        As for `ReferenceModel`.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: Weights,
        target: ReferenceModel,
        kv: KvType | None = None,
        activation_quantisation: ActivationQuantisation | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.linear = Linear(activation_quantisation)
        shares_embedding = "token_embd.weight" not in weights
        self.embedding = target.embedding if shares_embedding else weights["token_embd.weight"]
        self.head = weights.get("output.weight", target.head if shares_embedding else self.embedding)
        # the token that each logit is of
        self.tokens = weights["d2t"].values if "d2t" in weights else np.arange(len(self.head.values))
        target_scale = target.config.embedding_scale if shares_embedding else 1.0
        self._embedding_scale = target_scale if config.embedding_scale is None else config.embedding_scale
        self.committed = 0
        self._cache = Cache(config.layers, kv)

    def features(self, result: Result) -> np.ndarray:
        """The drafter's input (rows, target hidden * taps) from a target pass, first tap first."""
        return np.concatenate([result.taps[tap] for tap in self.config.taps], axis=-1)

    def inject(self, features: np.ndarray, start_position: int) -> None:
        """Write keys and values of committed positions start_position..; later ones are forgotten."""
        positions = start_position + np.arange(len(features))
        context = self._norm(self.linear(features, self.weights["fc.weight"]), "enc.output_norm")
        for layer in range(self.config.layers):
            keys_values = self._keys_values(context, layer, positions, self.config.context_rope)
            self._cache.extend(layer, start_position, *keys_values)
        self.committed = start_position + len(features)

    def block_hidden(self, anchor: int, rows: int) -> np.ndarray:
        """Final-normed hidden state (rows, hidden) of the block [anchor, mask, mask, ...]; stores nothing."""
        tokens = [anchor] + [self.config.mask_token] * (rows - 1)
        x = self.embedding.values[tokens] * self._embedding_scale
        for layer in range(self.config.layers):
            x = x + self._sublayer(x, layer, "attn", self._attention)
            x = x + self._sublayer(x, layer, "ffn", self._feed_forward)
        return self._norm(x, "output_norm")

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits (rows, tokens) of final-normed hidden states."""
        return softcap(self.linear(hidden, self.head) * self.config.logit_scale, self.config.logit_softcap)

    def propose(self, anchor: int, width: int) -> list[int]:
        """The greedy proposals for the `width` positions after the anchor."""
        return self.propose_and_weigh(anchor, width)[0]

    def propose_and_weigh(self, anchor: int, width: int) -> tuple[list[int], list[float]]:
        """Greedy proposals, and the probability of each, as llama.cpp's p-min has it: among the scores of the selector,
        or among the ten largest logits."""
        hidden = self.block_hidden(anchor, width + 1)[1:]
        logits = self.logits(hidden)
        if not self.config.selector_candidates:
            best = -np.sort(-logits, axis=-1)[:, :10]
            return [int(self.tokens[row.argmax()]) for row in logits], [softmax(row)[0] for row in best]
        gates = self.linear(hidden, self.weights["selector_hidden.weight"])
        proposals: list[int] = []
        confidence: list[float] = []
        previous = anchor
        for row, gate in zip(logits, gates, strict=True):
            candidates = np.argsort(-row, kind="stable")[: self.config.selector_candidates]
            scores = row[candidates] + self._edges(previous, gate, self.tokens[candidates])
            previous = int(self.tokens[candidates[scores.argmax()]])
            proposals.append(previous)
            confidence.append(softmax(scores).max())
        return proposals, confidence

    def _edges(self, previous: int, gate: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        predecessor = self.weights["selector_predecessor.weight"].values[previous]
        successors = self.weights["selector_successor.weight"].values[candidates]
        return successors @ (predecessor * gate)

    def _sublayer(
        self, x: np.ndarray, layer: int, name: str, function: Callable[[np.ndarray, int], np.ndarray]
    ) -> np.ndarray:
        normed = self._norm(x, f"blk.{layer}.{name}_norm")
        if not self.config.convolution_taps:
            return function(normed, layer)
        before, after = self._kernels(normed, layer, name)
        return convolve(function(convolve(normed, before), layer), after)

    def _kernels(self, normed: np.ndarray, layer: int, name: str) -> np.ndarray:
        """Convolution kernels (side, rows, taps, hidden): a fixed part plus one per row and channel group."""
        config = self.config
        base = self.weights[f"blk.{layer}.{name}_conv_base"].values
        projected = self.linear(normed, self.weights[f"blk.{layer}.{name}_conv_proj.weight"])
        dynamic = projected.reshape(len(normed), 2, config.convolution_taps, -1)
        return np.moveaxis(base + np.repeat(dynamic, config.convolution_group, axis=-1), 1, 0)

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        config = self.config
        positions = self.committed + np.arange(len(x))
        queries = self._project(x, layer, "attn_q").reshape(len(x), config.heads, config.head_size)
        queries = config.rope(self._norm(queries, f"blk.{layer}.attn_q_norm"), positions)
        # the block's own keys and values lie behind those of the context, and are rounded as they are
        block_keys, block_values = map(self._cache.rounded, self._keys_values(x, layer, positions, config.rope))
        keys, values = self._cache.read(layer)
        keys, values = np.concatenate([keys, block_keys]), np.concatenate([values, block_values])
        sinks = self.weights.get(f"blk.{layer}.attn_sinks.weight")
        mixed = attention(self._cache.query(queries), keys, values, self._visible(layer, len(x)),
                          config.head_size**-0.5, None if sinks is None else sinks.values)
        return self._project(mixed, layer, "attn_output")

    def _visible(self, layer: int, rows: int) -> np.ndarray:
        """(rows, committed + rows): the context within the window, and the block whole or up to the row itself."""
        sliding = self.config.sliding[layer]
        positions = self.committed + np.arange(rows)
        distance = positions[:, None] - np.arange(self.committed + rows)
        visible = np.ones(distance.shape, dtype=bool)
        if self.config.causal_sliding if sliding else self.config.causal_full:
            visible &= distance >= 0
        if sliding:
            visible &= distance < self.config.sliding_window
        return visible

    def _keys_values(
        self, x: np.ndarray, layer: int, positions: np.ndarray, rope: Rope
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(x), self.config.kv_heads, self.config.head_size)
        keys = self._norm(self._project(x, layer, "attn_k").reshape(shape), f"blk.{layer}.attn_k_norm")
        return rope(keys, positions), self._project(x, layer, "attn_v").reshape(shape)

    def _feed_forward(self, x: np.ndarray, layer: int) -> np.ndarray:
        gated = silu(self._project(x, layer, "ffn_gate")) * self._project(x, layer, "ffn_up")
        return self._project(gated, layer, "ffn_down")

    def _project(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        prefix = f"blk.{layer}.{name}"
        return self.linear(x, self.weights[f"{prefix}.weight"], self.weights.get(f"{prefix}.bias"))

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.weights[f"{name}.weight"].values, self.config.epsilon)


def convolve(x: np.ndarray, kernels: np.ndarray) -> np.ndarray:
    """Causal convolution over rows, with a kernel per row and channel; rows before the first are zero.

    Parameters
    ----------
    x, kernels
        (rows, hidden), (rows, taps, hidden); tap t weighs the row t places earlier.
    """
    y = np.zeros_like(x)
    for tap in range(kernels.shape[1]):
        y[tap:] += kernels[tap:, tap] * x[: len(x) - tap]
    return y


@dataclass(frozen=True)
class Speculation:
    """What greedy speculation emitted and what it took.

    Attributes
    ----------
    proposed, accepted
        Per round; `tokens` counts one more than accepted per round, plus the one from the prompt.
    """

    tokens: list[int]
    proposed: list[int]
    accepted: list[int]


def speculate(
    target: ReferenceModel, drafter: ReferenceDrafter, prompt: Sequence[int], count: int, width: int
) -> Speculation:
    """Greedy decoding of `count` tokens in rounds of draft, verify, accept and inject.

    A round proposes at most what the budget can still take with its own extra token.
    """
    result = target.forward(prompt, 0)
    drafter.inject(drafter.features(result), 0)
    committed = len(prompt)
    tokens = [int(result.logits[-1].argmax())]
    proposed, accepted = [], []
    while len(tokens) < count:
        anchor = tokens[-1]
        round_width = min(width, count - len(tokens) - 1)
        proposals = drafter.propose(anchor, round_width) if round_width else []
        result = target.forward([anchor, *proposals], committed)
        choices = [int(row.argmax()) for row in result.logits]
        agreed = 0
        while agreed < len(proposals) and proposals[agreed] == choices[agreed]:
            agreed += 1
        drafter.inject(drafter.features(result)[: agreed + 1], committed)
        committed += agreed + 1
        tokens += choices[: agreed + 1]
        proposed.append(len(proposals))
        accepted.append(agreed)
    return Speculation(tokens, proposed, accepted)
