"""Keys and values as float16: a word holds two neighbouring dimensions.

K: [kv_heads][capacity / 32][D / 2][32]; V: [kv_heads][capacity][D / 2].
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, KernelBuilder, barrier, bind, f32, fma, i32, load, store, u32
from dflashc.targets.gpu.kernels.attention_head import LANES
from dflashc.targets.gpu.kernels.kv_type import KEYS, QUERIES, Place, half_bits
from dflashc.targets.gpu.traits import Traits

_WORDS = 8  # words of a key whose loads are in flight at the same time


class Float16:
    """See `kv_type.KvType`; keys meet float32 queries, shared float32 [D][8]."""

    def __init__(self, traits: Traits, size: int) -> None:
        self.traits, self.size, self._pairs = traits, size, size // 2

    def store_key(self, keys: Expr, place: Place, element: Callable[[Expr], Expr], thread: Expr, wanted: Expr,
                  scratch: Expr) -> None:
        self._store(keys, place.key, element, thread, wanted)

    def store_value(self, values: Expr, place: Place, element: Callable[[Expr], Expr], thread: Expr, wanted: Expr,
                    scratch: Expr) -> None:
        self._store(values, place.value, element, thread, wanted)

    def _store(self, cache: Expr, word: Callable[[int, Expr], Expr], element: Callable[[Expr], Expr], thread: Expr,
               wanted: Expr) -> None:
        lane = bind(tirx.truncmod(thread, i32(LANES)))
        with T.If(wanted), T.Then(), T.serial(i32(0), i32(math.ceil(self._pairs / LANES))) as turn:
            pair = bind(turn * LANES + lane)
            with T.If(pair < self._pairs), T.Then():
                x, y = (half_bits(element(bind(pair * 2 + i))) for i in range(2))
                store(cache, word(self._pairs, pair), x | tirx.shift_left(y, u32(16)))

    def declare_queries(self, k: KernelBuilder) -> None:
        self._queries = k.shared(self.size * QUERIES, "float32")

    def keep_query(self, query: Expr, dimension: Expr, value: Expr) -> None:
        store(self._queries, dimension * QUERIES + query, value)

    def take_queries(self, thread: Expr) -> None:
        barrier()

    def scores(self, keys: Expr, place: Place, scores: Expr) -> None:
        first = bind(place.key(self._pairs, 0))
        for q in range(QUERIES):
            store(scores, q, f32(0))
        with T.serial(i32(0), i32(self._pairs // _WORDS)) as step:
            words = [bind(load(keys, first + (step * _WORDS + i) * KEYS)) for i in range(_WORDS)]
            for i, word in enumerate(words):
                for half, value in enumerate(unpack(self.traits, word)):
                    at = bind((step * (2 * _WORDS) + (2 * i + half)) * QUERIES)
                    for q in range(QUERIES):
                        store(scores, q, fma(load(self._queries, at + q), value, load(scores, q)))

    def load_value(self, values: Expr, place: Place, pair: Expr) -> tuple[Expr, ...]:
        return (bind(load(values, place.value(self._pairs, pair))),)

    def value(self, words: tuple[Expr, ...], pair: Expr) -> tuple[Expr, Expr]:
        return unpack(self.traits, words[0])


def unpack(traits: Traits, word: Expr) -> tuple[Expr, Expr]:
    """The two float16 of a word, as float32."""
    low = traits.half_to_float(word & u32(0xFFFF))
    return bind(low), bind(traits.half_to_float(tirx.shift_right(word, u32(16))))
