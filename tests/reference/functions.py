"""The functions that language models are made of, in NumPy, one formula each.

Knows nothing about models, files or caches. Arrays keep their float type; rows are positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """Root-mean-square normalisation over the last axis (Zhang and Sennrich, 2019)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; entries of minus infinity get exactly 0."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Logarithm of the softmax over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The tanh approximation of GELU (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softcap(x: np.ndarray, limit: float) -> np.ndarray:
    """limit * tanh(x / limit); the identity when limit is 0."""
    return limit * np.tanh(x / limit) if limit else x


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021) with the scalings found in model files.

    Attributes
    ----------
    dimensions
        How many leading dimensions of a head are rotated.
    adjacent
        Pairs are (2i, 2i+1), as in the paper, rather than (i, i + dimensions/2).
    scaling, factor
        "none"; "linear": positions are divided by `factor` (Chen et al., 2023);
        "yarn": by parts, and the result grows by 0.1 ln(factor) + 1 (Peng et al., 2023).
    beta_fast, beta_slow
        Yarn: pairs that turn more often than `beta_fast` times in `original_context` positions stay unscaled,
        those that turn less often than `beta_slow` times are scaled fully.
    divisors
        One per pair, divides its frequency (Llama 3 stores its scaling in this form).
    """

    base: float
    dimensions: int
    adjacent: bool = False
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    divisors: np.ndarray | None = None

    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair, shape (dimensions / 2,), float64."""
        pair = np.arange(self.dimensions // 2, dtype=np.float64)
        unscaled = self.base ** (-2 * pair / self.dimensions)
        if self.divisors is not None:
            unscaled = unscaled / self.divisors
        if self.scaling == "linear":
            return unscaled / self.factor
        if self.scaling == "yarn":
            scaled_share = self._scaled_share(pair)
            return scaled_share * unscaled / self.factor + (1 - scaled_share) * unscaled
        return unscaled

    def _scaled_share(self, pair: np.ndarray) -> np.ndarray:
        def pair_that_turns(times: float) -> float:
            turns = self.original_context / (times * 2 * np.pi)
            return self.dimensions * np.log(turns) / (2 * np.log(self.base))

        first = max(np.floor(pair_that_turns(self.beta_fast)), 0)
        last = min(np.ceil(pair_that_turns(self.beta_slow)), self.dimensions - 1)
        return np.clip((pair - first) / max(last - first, 0.001), 0, 1)

    def __call__(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotate x (rows, heads, head size) to the positions (rows,)."""
        angles = np.outer(positions, self.frequencies())[:, None, :]
        magnitude = self.attention_factor
        if self.scaling == "yarn":
            magnitude *= 1 + 0.1 * np.log(self.factor)
        cosine = (np.cos(angles) * magnitude).astype(x.dtype)
        sine = (np.sin(angles) * magnitude).astype(x.dtype)
        half = self.dimensions // 2
        if self.adjacent:
            first, second = slice(0, self.dimensions, 2), slice(1, self.dimensions, 2)
        else:
            first, second = slice(0, half), slice(half, self.dimensions)
        rotated = x.copy()
        rotated[..., first] = x[..., first] * cosine - x[..., second] * sine
        rotated[..., second] = x[..., second] * cosine + x[..., first] * sine
        return rotated


def attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    visible: np.ndarray,
    scale: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Grouped-query attention: query head j reads key head j // (heads / key heads).

    Parameters
    ----------
    queries, keys, values
        (rows, heads, d), (length, key heads, d), (length, key heads, d).
    visible
        (rows, length), true where a row may look.
    sinks
        (heads,), a logit that every row's softmax has besides its keys, and no value (Xiao et al., 2023).

    Returns
    -------
    (rows, heads * d)
    """
    rows, heads, _ = queries.shape
    group = heads // keys.shape[1]
    keys = np.repeat(keys, group, axis=1)
    values = np.repeat(values, group, axis=1)
    scores = np.einsum("rhd,lhd->hrl", queries, keys) * scale
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (heads, rows, 1))], axis=-1)
    return np.einsum("hrl,lhd->rhd", softmax(scores)[..., : len(keys)], values).reshape(rows, -1)


@dataclass(frozen=True)
class KvType:
    """How K and V are stored, and what becomes of queries before they meet such keys: roundings over the last axis."""

    stored: Callable[[np.ndarray], np.ndarray]
    query: Callable[[np.ndarray], np.ndarray]


def round_float16(x: np.ndarray) -> np.ndarray:
    """To float16 and back."""
    return x.astype(np.float16).astype(x.dtype)


def round_q8_0(x: np.ndarray) -> np.ndarray:
    """To ggml's q8_0 and back: int8 times a float16 scale, max|x| / 127, for every 32 neighbours."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / 127
    codes = np.rint(groups / np.where(scale == 0, 1, scale))
    return (codes * round_float16(scale)).reshape(x.shape)


F16 = KvType(round_float16, lambda q: q)
Q8_0 = KvType(round_q8_0, lambda q: quantise_activations(q, 32))
"""Integer dot products of codes need the queries in int8 too."""

KV_TYPES = {"f16": F16, "q8_0": Q8_0}


def quantise_activations(x: np.ndarray, group: int) -> np.ndarray:
    """Round each group of neighbours to int8 and back: scale = max|x| / 127, halves to even.

    Parameters
    ----------
    x
        (rows, columns), columns divisible by `group`.
    """
    groups = x.reshape(*x.shape[:-1], -1, group)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / 127
    codes = np.rint(groups / np.where(scale == 0, 1, scale))
    return (codes * scale).reshape(x.shape)
