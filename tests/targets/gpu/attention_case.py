"""A runner that drives the attention kernels the way a plan does."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dflashc.targets.gpu.kernels.activation import spans
from dflashc.targets.gpu.kernels.attention import attention, query_chunks, store_chunks
from dflashc.targets.gpu.kernels.attention_merge import attention_merge
from dflashc.targets.gpu.kernels.attention_reach import PART
from dflashc.targets.gpu.traits import Traits
from tests.caches import GPU, by_slot, decode, encode, in_memory
from tests.targets import samples
from tests.targets.attention_formula import Shape, Tokens
from tests.targets.gpu.emulation import run_anywhere


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
        self.packed_keys, self.packed_values = self._filled("k", self.old_keys), self._filled("v", self.old_values)

    def _filled(self, which: str, old: np.ndarray) -> np.ndarray:
        shape = self.shape
        numbers = np.full((shape.kv_heads, self.capacity, shape.size), np.nan, np.float32)
        kept = np.arange(max(0, self.start - self.capacity), self.start)
        numbers[:, kept % self.capacity] = old[:, kept]
        memory = in_memory(encode(numbers, shape.kv, which, GPU), shape.kv, which, shape.size, GPU)
        return np.ascontiguousarray(memory).view(np.uint32)

    def stored(self, which: str) -> np.ndarray:
        """The K or V cache, float64 (kv_heads, capacity, D)."""
        shape, memory = self.shape, self.packed_keys if which == "k" else self.packed_values
        slots = by_slot(memory.view(np.uint8).reshape(shape.kv_heads, -1), shape.kv, which, shape.size, GPU)
        return decode(slots, shape.kv, which, GPU)

    def expected(self, block: bool = False) -> np.ndarray:
        """Attention output over the cache as the kernels have written it."""
        kept = np.arange(self.start + self.tokens)
        keys, values = (self.stored(which)[:, kept % self.capacity] for which in "kv")
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
        kernel = attention(self.traits, shape.size, shape.pairing, shape.head_norm, shape.kv)
        ran = run_anywhere(self.traits, kernel, [
            state, self.qkv[take], table, *norms, self.packed_keys, self.packed_values, *partial, rows, stored,
            first_row, attended, chunks, shape.group, shape.kv_heads, self.capacity, self.window, int(block),
            self.pairs, self.scale, *([self.epsilon] if shape.head_norm else [])], shape.kv_heads * slots * chunks)
        self.packed_keys, self.packed_values = ran[-4:-2]
        return [state, *ran[-2:]]

    def _merge(self, partial: list[np.ndarray], outputs: list[np.ndarray], form: str, rows: int, first_row: int,
               attended: int, block: bool) -> list[np.ndarray]:
        shape = self.shape
        sinks = [self.sinks] if shape.sinks else []
        kernel = attention_merge(self.traits, form, "sinks" if sinks else "keys")
        ran = run_anywhere(self.traits, kernel, [
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
