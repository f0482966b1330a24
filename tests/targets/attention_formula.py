"""Attention by formula in float64, on random tokens over a cache of random keys: for the tests of all targets."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.caches import BLOCK, GPU, decode, encode


@dataclass(frozen=True)
class Shape:
    """What attention is compiled for, and the number of KV heads.

    `sinks` are logits without a value, one a head; `kv` is the type of the caches.
    """

    group: int
    size: int
    pairing: str
    head_norm: bool
    kv_heads: int = 2
    sinks: bool = False
    kv: str = "f16"

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def suffix(self) -> str:
        return f"{self.size}_{self.pairing}_{'norm' if self.head_norm else 'plain'}_{self.kv}{self.last}"

    @property
    def last(self) -> str:
        return "_sinks" if self.sinks else ""


@dataclass
class Tokens:
    """Tokens at positions from `start` on, and `start` random keys and values before them, (kv_heads, start, D).

    `pairs` of dimensions are rotated, all where it is negative.
    """

    shape: Shape
    start: int
    tokens: int
    window: int = 0
    pairs: int = -1
    epsilon: float = 1e-6
    qkv: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shape, random = self.shape, np.random.default_rng(self.start + self.tokens)
        self.pairs = shape.size // 2 if self.pairs < 0 else self.pairs
        self.scale = float(np.float32(shape.size**-0.5))
        columns = (shape.heads + 2 * shape.kv_heads) * shape.size
        self.qkv = random.standard_normal((self.tokens, columns), np.float32)
        self.q_norm = random.uniform(0.5, 1.5, shape.size).astype(np.float32)
        self.k_norm = random.uniform(0.5, 1.5, shape.size).astype(np.float32)
        self.sinks = random.uniform(-3, 6, shape.heads).astype(np.float32)
        angle = np.outer(self.start + np.arange(self.tokens), 1e4 ** (-np.arange(self.pairs) / max(self.pairs, 1)))
        self.cosine, self.sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.old_keys, self.old_values = (
            random.standard_normal((shape.kv_heads, self.start, shape.size), np.float32) for _ in range(2))

    def rotated(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Norm and rotary embedding of (tokens, heads, D)."""
        x = x.astype(np.float64)
        if self.shape.head_norm:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * weight
        pairs = self.pairs
        if self.shape.pairing == "neox":
            first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        else:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        c, s = self.cosine.astype(np.float64)[:, None], self.sine.astype(np.float64)[:, None]
        result = x.copy()
        result[..., first] = x[..., first] * c - x[..., second] * s
        result[..., second] = x[..., first] * s + x[..., second] * c
        return result

    def new_keys_values(self) -> tuple[np.ndarray, np.ndarray]:
        """K (float64) and V (float32) of the tokens before they are stored, (kv_heads, tokens, D)."""
        heads = self.qkv.reshape(self.tokens, -1, self.shape.size)[:, self.shape.heads :].swapaxes(0, 1)
        keys = self.rotated(heads[: self.shape.kv_heads].swapaxes(0, 1), self.k_norm).swapaxes(0, 1)
        return keys, heads[self.shape.kv_heads :]

    def queries(self) -> np.ndarray:
        """Scaled queries (tokens, heads, D), float64; beside keys in q8_0 they are rounded to int8 codes."""
        queries = self._unrounded_queries()
        if self.shape.kv == "f16":
            return queries
        blocks = queries.reshape(-1, BLOCK)
        steps = np.abs(blocks).max(axis=-1, keepdims=True) / 127
        return (np.rint(blocks / steps) * steps).reshape(queries.shape)

    def _unrounded_queries(self) -> np.ndarray:
        heads = self.qkv.reshape(self.tokens, -1, self.shape.size)[:, : self.shape.heads]
        return self.rotated(heads, self.q_norm) * self.scale

    def clearly_rounded(self) -> np.ndarray:
        """Per token and head (tokens, heads * D): whether no element of the query is near the middle of two codes, so
        that float32 rounds as float64 does."""
        shape = self.shape
        if shape.kv == "f16":
            return np.ones((self.tokens, shape.heads * shape.size), bool)
        blocks = self._unrounded_queries().reshape(-1, BLOCK)
        codes = blocks / (np.abs(blocks).max(axis=-1, keepdims=True) / 127)
        near = np.abs(np.abs(codes - np.rint(codes)) - 0.5) < 2e-4
        clear = ~near.reshape(self.tokens, shape.heads, shape.size).any(axis=-1)
        return np.repeat(clear, shape.size, axis=-1)

    def attend(self, keys: np.ndarray, values: np.ndarray, block: bool = False) -> np.ndarray:
        """Attention output (tokens, heads * D) over keys and values (kv_heads, start + tokens, D) as a cache has them.

        With `block` the tokens see each other, else only what is before them.
        """
        shape, queries = self.shape, self.queries()
        end = self.start + self.tokens
        keys, values = keys.astype(np.float64), values.astype(np.float64)
        position, key = self.start + np.arange(self.tokens)[:, None], np.arange(end)
        seen = ((key <= position) | block) & (key > position - (self.window or end))
        result = np.empty((self.tokens, shape.heads, shape.size))
        for head in range(shape.heads):
            score = np.where(seen, queries[:, head] @ keys[head // shape.group].T, -np.inf)
            highest = score.max(-1, keepdims=True)
            weight = np.exp(score - highest)
            total = weight.sum(-1, keepdims=True) + (np.exp(self.sinks[head] - highest) if shape.sinks else 0)
            result[:, head] = weight / total @ values[head // shape.group]
        return result.reshape(self.tokens, -1)


def rounding(x: np.ndarray, kv: str) -> np.ndarray:
    """How far a cache of type `kv` may be from the numbers (..., D) that it stores."""
    if kv == "f16":
        return 2**-10 * np.abs(x)
    steps = np.abs(x.reshape(*x.shape[:-1], -1, BLOCK)).max(-1) / 127  # half of one, and the scale's own rounding
    return 0.501 * np.repeat(steps, BLOCK, axis=-1) + 2**-11 * np.abs(x)


def stored_as(values: np.ndarray, kv: str) -> np.ndarray:
    """What a cache of type `kv` makes of float32 numbers, float64."""
    return decode(encode(values, kv, "v", GPU), kv, "v", GPU)


def assert_formula(output: np.ndarray, tokens: Tokens, expected: np.ndarray, atol: float = 4e-6) -> None:
    """By the formula, but for queries that float32 may round to another code than float64."""
    clear = tokens.clearly_rounded()
    assert clear.mean() > 0.8
    np.testing.assert_allclose(output[clear], expected[clear], rtol=0, atol=atol)
