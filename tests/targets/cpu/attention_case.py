"""A runner that drives the attention kernels the way a plan does, over caches of any type and capacity."""

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
from tests.caches import by_slot, decode, encode, in_memory
from tests.targets.attention_formula import Shape, Tokens
from tests.targets.cpu.native import Library


def suffix(shape: Shape) -> str:
    """The end of the kernels' names."""
    return f"{shape.suffix}_{shape.kv}" + ("_sinks" if shape.sinks else "")


def requests(shape: Shape, rows: tuple[int, ...], forms: tuple[str, ...] = ("f32",)) -> list[KernelRequest]:
    """Every kernel that programs of these rows and prefill programs need."""
    common, end = (shape.size, shape.pairing, shape.head_norm, shape.kv), suffix(shape)
    denominator = "sinks" if shape.sinks else "keys"
    return [
        *(KernelRequest(f"attention_{m}_{shape.group}_{end}", attention, (m, shape.group, *common)) for m in rows),
        *(KernelRequest(f"attention_merge_{form}_{end}", attention_merge, (shape.size, form, "causal", denominator))
          for form in forms),
        KernelRequest(f"kv_write_{end}", kv_write, common),
        KernelRequest(f"attention_prefill_{shape.group}_{end}", attention_prefill,
                      (shape.group, *common, denominator))]


class Sequence(Tokens):
    """The tokens, and caches of `capacity` tokens, by default as many as there are.

    Positions from `start` on hold NaN in the caches: whoever reads a key that is not yet written shows it.

    Attributes
    ----------
    keys, values : uint8 (kv_heads, bytes), the caches
    """

    def __init__(self, library: Library, shape: Shape, start: int, tokens: int, window: int = 0, pairs: int = -1,
                 capacity: int = 0) -> None:
        super().__init__(shape, start, tokens, window, pairs)
        self.library = library
        self.capacity = capacity or -(-(start + tokens) // PART) * PART
        self.keys, self.values = self._filled("k", self.old_keys), self._filled("v", self.old_values)

    def _filled(self, which: str, old: np.ndarray) -> np.ndarray:
        shape = self.shape
        numbers = np.full((shape.kv_heads, self.capacity, shape.size), np.nan, np.float32)
        kept = np.arange(max(0, self.start - self.capacity), self.start)
        numbers[:, kept % self.capacity] = old[:, kept]
        lanes = self.library.traits.lanes
        return in_memory(encode(numbers, shape.kv, which, lanes), shape.kv, which, shape.size, lanes)

    def stored(self, which: str) -> np.ndarray:
        """The K or V cache, float64 (kv_heads, capacity, D)."""
        shape, memory = self.shape, self.keys if which == "k" else self.values
        lanes = self.library.traits.lanes
        return decode(by_slot(memory, shape.kv, which, shape.size, lanes), shape.kv, which, lanes)

    def expected(self) -> np.ndarray:
        """Attention output (tokens, heads * D), over the caches as the kernels have written them."""
        slots = np.arange(self.start + self.tokens) % self.capacity
        return self.attend(self.stored("k")[:, slots], self.stored("v")[:, slots])

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
        shape, inputs, end = self.shape, self._row_inputs(first, rows), suffix(self.shape)
        parts = window_parts(self.window, rows) if self.window else -(-(self.start + first + rows) // PART)
        units, queries = shape.kv_heads * parts, rows * shape.group
        partial_values = np.full(units * queries * shape.size, np.nan, np.float32)
        partial_sums = np.full(units * queries * 2, np.nan, np.float32)
        self.library.run(f"attention_{rows}_{shape.group}_{end}", [
            *inputs, *self._norms("q_norm", "k_norm"), self.keys, self.values, partial_values, partial_sums,
            self.qkv.shape[1], shape.kv_heads, self.capacity, self.window, self.pairs, self.scale, *self._epsilon()],
            units)
        result = np.zeros((rows, shape.heads * shape.size), np.float32)
        self.library.run(f"attention_merge_{form}_{end}", [
            inputs[0], partial_values, partial_sums, *self._sinks(), *(outputs or [result]), rows, shape.kv_heads,
            shape.group, self.window], rows * shape.heads // heads_per_unit(shape.size, form))
        return result

    def prefill(self, first: int, rows: int) -> np.ndarray:
        """Rows [first, first + rows) in one program of `kv_write` and `attention_prefill`."""
        shape, inputs, end = self.shape, self._row_inputs(first, rows), suffix(self.shape)
        units, leading = shape.kv_heads * rows // BLOCK, self.qkv.shape[1]
        self.library.run(f"kv_write_{end}", [
            *inputs, *self._norms("k_norm"), self.keys, self.values, leading, shape.heads, shape.kv_heads,
            self.capacity, self.pairs, *self._epsilon()], units)
        result = np.zeros((rows, shape.heads * shape.size), np.float32)
        self.library.run(f"attention_prefill_{shape.group}_{end}", [
            *inputs, *self._norms("q_norm"), self.keys, self.values, *self._sinks(), result, rows, leading,
            shape.kv_heads, self.capacity, self.window, self.pairs, self.scale, *self._epsilon()], units)
        return result

    def run(self, widths: Iterable[int], first: int = 0) -> np.ndarray:
        """Tokens from `first` on in verify programs of these widths, one after the other."""
        results = []
        for width in widths:
            results.append(self.verify(first, width))
            first += width
        return np.concatenate(results)
