"""A runner that drives the attention kernels the way a plan does."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dflashc.targets.gpu.kernels.activation import spans
from dflashc.targets.gpu.kernels.attention import attention, query_chunks, store_chunks
from dflashc.targets.gpu.kernels.attention_merge import attention_merge
from dflashc.targets.gpu.kernels.attention_reach import PART
from dflashc.targets.gpu.traits import Traits
from tests.targets import samples
from tests.targets.attention_formula import Shape, Tokens
from tests.targets.gpu.running import run_kernel


class Sequence(Tokens):
    """The tokens, and caches of `capacity` tokens, by default as many as there are.

    Positions from `start` on hold NaN in the caches, and so do all partial results before a kernel stores them: whoever
    reads what is not yet written shows it.
    """

    def __init__(self, traits: Traits, shape: Shape, start: int, tokens: int, window: int = 0, pairs: int = -1,
                 capacity: int = 0) -> None:
        super().__init__(shape, start, tokens, window, pairs)
        self.traits = traits
        self.capacity = capacity or -(-(start + tokens) // PART) * PART
        keys, values = (np.full((shape.kv_heads, self.capacity, shape.size), np.nan, np.float16) for _ in range(2))
        kept = np.arange(max(0, self.start - self.capacity), self.start)
        keys[:, kept % self.capacity], values[:, kept % self.capacity] = (
            self.old_keys[:, kept], self.old_values[:, kept])
        split = (shape.kv_heads, self.capacity // 32, 32, shape.size // 2, 2)
        self.packed_keys = np.ascontiguousarray(keys.reshape(split).swapaxes(2, 3)).view(np.uint32)
        self.packed_values = values.view(np.uint32)

    def keys(self) -> np.ndarray:
        """The K cache as float16 [kv_heads][capacity][D]."""
        return self.packed_keys.view(np.float16).swapaxes(2, 3).reshape(self.shape.kv_heads, self.capacity, -1)

    def values(self) -> np.ndarray:
        """The V cache as float16 [kv_heads][capacity][D]."""
        return self.packed_values.view(np.float16)

    def expected(self, block: bool = False) -> np.ndarray:
        """Attention output over the cache as the kernels have written it."""
        kept = np.arange(self.start + self.tokens)
        keys, values = (cache[:, kept % self.capacity] for cache in (self.keys(), self.values()))
        return self.attend(keys, values, block)

    def _attention(self, first: int, rows: int, stored: int, first_row: int, attended: int,
                   block: bool) -> list[np.ndarray]:
        """One launch of `attention` for the program of rows [first, first + rows)."""
        shape, slots = self.shape, self.traits.attention_slots
        take = slice(first, first + rows)
        state = np.array([self.start + first, 0]).view(np.int32)
        table = np.stack([self.cosine[take], self.sine[take]])
        partial = [np.full((slots, max(attended, 1), shape.heads, n), np.nan, np.float32) for n in (shape.size, 2)]
        chunks = query_chunks(attended, shape.group) if attended else store_chunks(stored)
        norms = [self.q_norm, self.k_norm] if shape.head_norm else []
        kernel = attention(self.traits, shape.size, shape.pairing, shape.head_norm)
        ran = run_kernel(kernel, [
            state, self.qkv[take], table, *norms, self.packed_keys, self.packed_values, *partial, rows, stored,
            first_row, attended, chunks, shape.group, shape.kv_heads, self.capacity, self.window, int(block),
            self.pairs, self.scale, *([self.epsilon] if shape.head_norm else [])], shape.kv_heads * slots * chunks)
        self.packed_keys, self.packed_values = ran[-4:-2]
        return [state, *ran[-2:]]

    def _merge(self, partial: list[np.ndarray], outputs: list[np.ndarray], form: str, rows: int, first_row: int,
               attended: int, block: bool) -> list[np.ndarray]:
        shape = self.shape
        sinks = [self.sinks] if shape.sinks else []
        ran = run_kernel(attention_merge(self.traits, form, "sinks" if sinks else "keys"), [
            *partial, *sinks, *outputs, rows, first_row, attended, shape.heads, shape.size, self.window, int(block)],
            attended * spans(shape.heads * shape.size))
        return ran[-len(outputs):]

    def verify(self, first: int, rows: int, form: str = "f32", block: bool = False) -> list[np.ndarray]:
        """Rows [first, first + rows) in one program of up to 16 rows; the buffers of `form`."""
        partial = self._attention(first, rows, rows, 0, rows, block)
        outputs = samples.empty_form(form, rows, self.shape.heads * self.shape.size)
        return self._merge(partial, outputs, form, rows, 0, rows, block)

    def prefill(self, first: int, rows: int, at_once: int) -> np.ndarray:
        """Rows [first, first + rows) in one program that stores them first, then attends `at_once` rows at a time."""
        self._attention(first, rows, rows, 0, 0, False)
        output = np.zeros((rows, self.shape.heads * self.shape.size), np.float32)
        for row in range(0, rows, at_once):
            attended = min(at_once, rows - row)
            partial = self._attention(first, rows, 0, row, attended, False)
            (output,) = self._merge(partial, [output], "f32", rows, row, attended, False)
        return output

    def run(self, widths: Iterable[int]) -> np.ndarray:
        """All tokens in verify programs of these widths, one after the other."""
        first, results = 0, []
        for width in widths:
            results += self.verify(first, width)
            first += width
        assert first == self.tokens
        return np.concatenate(results)
