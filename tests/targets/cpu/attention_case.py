"""Attention by formula in float64, and a runner that drives the attention kernels the way a plan does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dflashc.targets.cpu.kernels.attention import (
    BLOCK,
    attention,
    attention_merge,
    attention_prefill,
    heads_per_unit,
    kv_write,
    window_parts,
)
from dflashc.targets.cpu.kernels.attention_tile import PART
from dflashc.targets.requests import KernelRequest
from tests.caches import BLOCK as Q8_BLOCK
from tests.caches import by_slot, decode, encode, in_memory
from tests.targets.cpu.native import Library


@dataclass(frozen=True)
class Shape:
    """What attention is compiled for, and the number of KV heads."""

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

    def requests(self, rows: tuple[int, ...], forms: tuple[str, ...] = ("f32",)) -> list[KernelRequest]:
        """Every kernel that programs of these rows and prefill programs need."""
        common = (self.size, self.pairing, self.head_norm, self.kv)
        denominator = ("sinks",) if self.sinks else ()
        result = [KernelRequest(f"attention_{m}_{self.group}_{self.suffix}", attention, (m, self.group, *common))
                  for m in rows]
        result += [KernelRequest(f"attention_merge_{self.size}_{form}{self.last}", attention_merge,
                                 (self.size, form, "causal", *denominator)) for form in forms]
        result.append(KernelRequest(f"kv_write_{self.suffix}", kv_write, common))
        result.append(KernelRequest(f"attention_prefill_{self.group}_{self.suffix}", attention_prefill,
                                    (self.group, *common, *denominator)))
        return result


@dataclass
class Sequence:
    """Tokens from position `start` on, over a cache of random keys before it.

    Positions from `start` on hold NaN in the cache: whoever reads a key that is not yet written shows it.

    Attributes
    ----------
    keys, values : uint8 (kv_heads, bytes), the caches
    """

    library: Library
    shape: Shape
    start: int
    tokens: int
    window: int = 0
    pairs: int = -1
    epsilon: float = 1e-6
    qkv: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shape, random = self.shape, np.random.default_rng(self.start + self.tokens)
        self.capacity = -(-(self.start + self.tokens) // PART) * PART
        self.pairs = shape.size // 2 if self.pairs < 0 else self.pairs
        self.scale = float(np.float32(shape.size**-0.5))
        columns = (shape.heads + 2 * shape.kv_heads) * shape.size
        self.qkv = random.standard_normal((self.tokens, columns), np.float32)
        self.q_norm = random.uniform(0.5, 1.5, shape.size).astype(np.float32)
        self.k_norm = random.uniform(0.5, 1.5, shape.size).astype(np.float32)
        self.sinks = random.uniform(-3, 6, shape.heads).astype(np.float32)
        angle = np.outer(self.start + np.arange(self.tokens), 1e4 ** (-np.arange(self.pairs) / max(self.pairs, 1)))
        self.cosine, self.sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.keys, self.values = (self._filled(which, random) for which in "kv")

    def _filled(self, which: str, random: np.random.Generator) -> np.ndarray:
        shape = self.shape
        numbers = np.full((shape.kv_heads, self.capacity, shape.size), np.nan, np.float32)
        numbers[:, : self.start] = random.standard_normal((shape.kv_heads, self.start, shape.size), np.float32)
        return in_memory(encode(numbers, shape.kv, which), shape.kv, which, shape.size, self.library.traits.lanes)

    def stored(self, which: str) -> np.ndarray:
        """The K or V cache, float64 (kv_heads, capacity, D)."""
        shape, memory = self.shape, self.keys if which == "k" else self.values
        slots = by_slot(memory, shape.kv, which, shape.size, self.library.traits.lanes)
        return decode(slots, shape.kv, which)

    # The kernels, called as a plan calls them

    def _row_inputs(self, first: int, rows: int) -> tuple[np.ndarray, ...]:
        take = slice(first, first + rows)
        return np.array([self.start + first]), self.qkv[take], self.cosine[take], self.sine[take]

    def _norms(self, *names: str) -> list[np.ndarray]:
        return [getattr(self, name) for name in names] if self.shape.head_norm else []

    def _sinks(self) -> list[np.ndarray]:
        return [self.sinks] if self.shape.sinks else []

    def _epsilon(self) -> list[float]:
        return [self.epsilon] if self.shape.head_norm else []

    def verify(self, first: int, rows: int, form: str = "f32", outputs: list[np.ndarray] | None = None) -> np.ndarray:
        """Rows [first, first + rows) in one program of `attention` and `attention_merge`."""
        shape, inputs = self.shape, self._row_inputs(first, rows)
        parts = -(-(self.start + first + rows) // PART)
        units = shape.kv_heads * (window_parts(self.window, rows) if self.window else parts)
        queries = rows * shape.group
        partial_values = np.full(units * queries * shape.size, np.nan, np.float32)
        partial_sums = np.full(units * queries * 2, np.nan, np.float32)
        self.library.run(f"attention_{rows}_{shape.group}_{shape.suffix}", [
            *inputs, *self._norms("q_norm", "k_norm"), self.keys, self.values, partial_values, partial_sums,
            self.qkv.shape[1], shape.kv_heads, self.capacity, self.window, self.pairs, self.scale, *self._epsilon()],
            units)
        result = np.zeros((rows, shape.heads * shape.size), np.float32)
        self.library.run(f"attention_merge_{shape.size}_{form}{shape.last}", [
            inputs[0], partial_values, partial_sums, *self._sinks(), *(outputs or [result]), rows, shape.kv_heads,
            shape.group, self.window], rows * shape.heads // heads_per_unit(shape.size, form))
        return result

    def prefill(self, first: int, rows: int) -> np.ndarray:
        """Rows [first, first + rows) in one program of `kv_write` and `attention_prefill`."""
        shape, inputs = self.shape, self._row_inputs(first, rows)
        units, leading = shape.kv_heads * rows // BLOCK, self.qkv.shape[1]
        self.library.run(f"kv_write_{shape.suffix}", [
            *inputs, *self._norms("k_norm"), self.keys, self.values, leading, shape.heads, shape.kv_heads,
            self.capacity, self.pairs, *self._epsilon()], units)
        result = np.zeros((rows, shape.heads * shape.size), np.float32)
        self.library.run(f"attention_prefill_{shape.group}_{shape.suffix}", [
            *inputs, *self._norms("q_norm"), self.keys, self.values, *self._sinks(), result, rows, leading,
            shape.kv_heads, self.capacity, self.window, self.pairs, self.scale, *self._epsilon()], units)
        return result

    def run(self, widths: Iterable[int]) -> np.ndarray:
        """All tokens in verify programs of these widths, one after the other."""
        first, results = 0, []
        for width in widths:
            results.append(self.verify(first, width))
            first += width
        assert first == self.tokens
        return np.concatenate(results)

    # The formula, float64

    def _rotated(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
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
        """K (float64) and V (float32) of the new tokens before they are stored, (kv_heads, tokens, D)."""
        heads = self.qkv.reshape(self.tokens, -1, self.shape.size)[:, self.shape.heads :].swapaxes(0, 1)
        keys = self._rotated(heads[: self.shape.kv_heads].swapaxes(0, 1), self.k_norm).swapaxes(0, 1)
        return keys, heads[self.shape.kv_heads :]

    def queries(self) -> np.ndarray:
        """Scaled queries (tokens, heads, D), float64; beside q8_0 keys as they are after rounding to int8 codes."""
        shape = self.shape
        queries = self.qkv.reshape(self.tokens, -1, shape.size)[:, : shape.heads]
        queries = self._rotated(queries, self.q_norm) * self.scale
        if shape.kv == "f16":
            return queries
        blocks = queries.reshape(-1, Q8_BLOCK)
        steps = np.abs(blocks).max(axis=-1, keepdims=True) / 127
        return (np.rint(blocks / steps) * steps).reshape(queries.shape)

    def clearly_rounded(self) -> np.ndarray:
        """Per token and head (tokens, heads * D): whether no element of the query is near the middle of two codes, so
        that float32 rounds as float64 does."""
        shape = self.shape
        if shape.kv == "f16":
            return np.ones((self.tokens, shape.heads * shape.size), bool)
        queries = self._rotated(self.qkv.reshape(self.tokens, -1, shape.size)[:, : shape.heads], self.q_norm)
        blocks = queries.reshape(-1, Q8_BLOCK)
        codes = blocks / (np.abs(blocks).max(axis=-1, keepdims=True) / 127)
        near = np.abs(np.abs(codes - np.rint(codes)) - 0.5) < 2e-4
        clear = ~near.reshape(self.tokens, shape.heads, shape.size).any(axis=-1)
        return np.repeat(clear, shape.size, axis=-1)

    def expected(self) -> np.ndarray:
        """Attention output (tokens, heads * D), over the cache as the kernels have written it."""
        shape, queries = self.shape, self.queries()
        end = self.start + self.tokens
        keys, values = self.stored("k")[:, :end], self.stored("v")[:, :end]
        position, key = self.start + np.arange(self.tokens)[:, None], np.arange(end)
        seen = (key <= position) & (key > position - (self.window or end))
        result = np.empty((self.tokens, shape.heads, shape.size))
        for head in range(shape.heads):
            score = np.where(seen, queries[:, head] @ keys[head // shape.group].T, -np.inf)
            highest = score.max(-1, keepdims=True)
            weight = np.exp(score - highest)
            total = weight.sum(-1, keepdims=True)
            if shape.sinks:
                total += np.exp(self.sinks[head] - highest)
            result[:, head] = weight / total @ values[head // shape.group]
        return result.reshape(self.tokens, -1)
