"""A runner that drives the attention kernels the way a plan does, and what it must give."""

from __future__ import annotations

from collections.abc import Iterable

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
from tests.targets import attention_formula
from tests.targets.attention_formula import Tokens
from tests.targets.cpu.native import Library


class Shape(attention_formula.Shape):
    """The shape, and the kernels that it takes."""

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


class Sequence(Tokens):
    """The tokens, and caches.

    Positions from `start` on hold NaN in the caches: whoever reads a key that is not yet written shows it.

    Attributes
    ----------
    keys, values : uint8 (kv_heads, bytes), the caches
    """

    shape: Shape

    def __init__(self, library: Library, shape: Shape, start: int, tokens: int, window: int = 0,
                 pairs: int = -1) -> None:
        super().__init__(shape, start, tokens, window, pairs)
        self.library = library
        self.capacity = -(-(start + tokens) // PART) * PART
        self.keys, self.values = self._filled(self.old_keys, "k"), self._filled(self.old_values, "v")

    def _filled(self, old: np.ndarray, which: str) -> np.ndarray:
        shape = self.shape
        numbers = np.full((shape.kv_heads, self.capacity, shape.size), np.nan, np.float32)
        numbers[:, : self.start] = old
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

    def queries(self) -> np.ndarray:
        """Scaled queries (tokens, heads, D), float64; beside q8_0 keys as they are after rounding to int8 codes."""
        queries = super().queries()
        if self.shape.kv == "f16":
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
        blocks = super().queries().reshape(-1, Q8_BLOCK)
        codes = blocks / (np.abs(blocks).max(axis=-1, keepdims=True) / 127)
        near = np.abs(np.abs(codes - np.rint(codes)) - 0.5) < 2e-4
        clear = ~near.reshape(self.tokens, shape.heads, shape.size).any(axis=-1)
        return np.repeat(clear, shape.size, axis=-1)

    def expected(self) -> np.ndarray:
        """Attention output (tokens, heads * D), over the cache as the kernels have written it."""
        end = self.start + self.tokens
        return self.attend(self.stored("k")[:, :end], self.stored("v")[:, :end])
