"""Keys and values as ggml's q8_0: 32 values along the head share a float16 scale, value = scale * code.

A word holds four neighbouring codes, or the scales of two neighbouring blocks, so heads are multiples of 64. A head's
codes come first, the scales of all its tokens behind them.

K: [kv_heads]{[capacity / 32][D / 4][32] codes, [capacity / 32][D / 64][32] scales}
V: [kv_heads]{[capacity][D / 4] codes, [capacity][D / 64] scales}

Scores are exact integers per 32 dimensions, for which the queries are quantised likewise, with float32 scales; they
meet floats once per 32, as on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Expr,
    KernelBuilder,
    barrier,
    bind,
    cast,
    f32,
    fma,
    i32,
    load,
    reinterpret,
    select,
    store,
    u32,
)
from dflashc.targets.gpu.kernels.attention_head import LANES
from dflashc.targets.gpu.kernels.exact_floats import OFFSET_BITS, float_of_sum
from dflashc.targets.gpu.kernels.kv_type import KEYS, QUERIES, Place, half_bits
from dflashc.targets.gpu.kernels.quantised_rows import GROUP, PITCH, emit_group
from dflashc.targets.gpu.kernels.reduction import tree
from dflashc.targets.gpu.traits import Traits

MULTIPLE = 64
"""Of it heads are multiples."""

_WORDS = GROUP // 4  # of a block's codes, one per thread that stores them: 16 threads take two blocks
_TINY = 1e-36  # a block below it is stored as zeros; its scale as float16 is 0 anyway
_BELOW_HALF = 0.49999997  # the largest float32 below 1/2: added to 0.49999997 it must not give 1


class Q8:
    """See `kv_type.KvType`."""

    def __init__(self, traits: Traits, size: int) -> None:
        self.traits, self.size = traits, size
        self._codes, self._scales, self._blocks = size // 4, size // MULTIPLE, size // GROUP  # words, words, blocks

    def _behind(self, place: Place) -> tuple[Expr, Expr]:
        """What lies before a head's codes, and before its scales, beyond what arrays of either alone would have."""
        head = bind(place.head * place.capacity)
        return head * self._scales, (head + place.capacity) * self._codes

    def _key(self, place: Place) -> tuple[Expr, Expr]:
        """Indices of a key's first word of codes and of scales; the next ones follow at a distance of 32."""
        codes, scales = self._behind(place)
        return bind(place.key(self._codes, 0) + codes), bind(place.key(self._scales, 0) + scales)

    def _value(self, place: Place) -> tuple[Expr, Expr]:
        """Indices of a value's first word of codes and of scales."""
        codes, scales = self._behind(place)
        return bind(place.value(self._codes, 0) + codes), bind(place.value(self._scales, 0) + scales)

    def store_key(self, keys: Expr, place: Place, element: Callable[[Expr], Expr], thread: Expr, wanted: Expr,
                  scratch: Expr) -> None:
        self._store(keys, self._key(place), KEYS, element, thread, wanted, scratch)

    def store_value(self, values: Expr, place: Place, element: Callable[[Expr], Expr], thread: Expr, wanted: Expr,
                    scratch: Expr) -> None:
        self._store(values, self._value(place), 1, element, thread, wanted, scratch)

    def _store(self, cache: Expr, first: tuple[Expr, Expr], distance: int, element: Callable[[Expr], Expr],
               thread: Expr, wanted: Expr, scratch: Expr) -> None:
        """As ggml's quantize_row_q8_0_ref: d = max|x| / 127, code = x * (1 / d) to the nearest integer, halves away
        from zero; d is stored as float16. In a turn the 16 threads of a token take 64 of its elements, four each.
        """
        lane = bind(tirx.truncmod(thread, i32(LANES)))
        own = bind(tirx.truncmod(thread, i32(_WORDS)))
        codes, scales = first

        def scale_of(first_thread: Expr) -> Expr:
            largest = tree([bind(load(scratch, first_thread + i)) for i in range(_WORDS)], tirx.max)
            return bind(largest / f32(127))

        with T.serial(i32(0), i32(self._scales)) as turn:
            word = bind(turn * LANES + lane)
            numbers = [element(bind(word * 4 + i)) for i in range(4)]
            barrier()
            store(scratch, thread, tree([bind(tirx.abs(x)) for x in numbers], tirx.max))
            barrier()
            scale = scale_of(bind(thread - own))
            usable = bind(scale > f32(_TINY))
            inverse = bind(select(usable, f32(1) / scale, f32(0)))
            parts = [tirx.shift_left(_round_half_away(bind(x * inverse)) & i32(0xFF), i32(8 * i))
                     for i, x in enumerate(numbers)]
            with T.If(wanted), T.Then():
                store(cache, codes + word * distance, cast("uint32", parts[0] | parts[1] | parts[2] | parts[3]))
                with T.If(lane == i32(0)), T.Then():
                    both = half_bits(scale) | tirx.shift_left(half_bits(scale_of(bind(thread + _WORDS))), u32(16))
                    store(cache, scales + turn * distance, both)

    def declare_queries(self, k: KernelBuilder) -> None:
        blocks = QUERIES * self._blocks
        self._queries = k.shared(blocks * PITCH, "float32")
        self._query_codes, self._query_scales = k.shared(blocks * _WORDS, "int32"), k.shared(blocks, "float32")

    def keep_query(self, query: Expr, dimension: Expr, value: Expr) -> None:
        block = query * self._blocks + tirx.truncdiv(dimension, i32(GROUP))
        store(self._queries, block * PITCH + tirx.truncmod(dimension, i32(GROUP)), value)

    def take_queries(self, thread: Expr) -> None:
        barrier()
        with T.If(thread < QUERIES * self._blocks), T.Then():
            emit_group(self._queries, bind(thread * PITCH), (self._query_codes, self._query_scales), thread)
        barrier()

    def scores(self, keys: Expr, place: Place, scores: Expr) -> None:
        codes, scales = self._key(place)
        for q in range(QUERIES):
            store(scores, q, f32(0))
        with T.serial(i32(0), i32(self._blocks)) as block:
            words = [bind(load(keys, codes + (block * _WORDS + i) * KEYS)) for i in range(_WORDS)]
            scale = self._scale(bind(load(keys, scales + tirx.truncdiv(block, i32(2)) * KEYS)), block)
            for q in range(QUERIES):
                query, dot = bind(block + q * self._blocks), i32(OFFSET_BITS)
                for i, word in enumerate(words):
                    code = load(self._query_codes, query * _WORDS + i)
                    dot = bind(self.traits.dot4(code, cast("int32", word), dot))
                factor = bind(scale * load(self._query_scales, query))
                store(scores, q, fma(float_of_sum(dot), factor, load(scores, q)))

    def _scale(self, word: Expr, block: Expr) -> Expr:
        """The scale of block number `block` of a token, float32, from the word that holds it."""
        shift = bind((block & i32(1)) * 16)
        return bind(self.traits.half_to_float(bind(tirx.shift_right(word, cast("uint32", shift)) & u32(0xFFFF))))

    def load_value(self, values: Expr, place: Place, pair: Expr) -> tuple[Expr, ...]:
        codes, scales = self._value(place)
        return (bind(load(values, codes + tirx.truncdiv(pair, i32(2)))),
                bind(load(values, scales + tirx.truncdiv(pair, i32(MULTIPLE // 2)))))

    def value(self, words: tuple[Expr, ...], pair: Expr) -> tuple[Expr, Expr]:
        codes, scale = bind(reinterpret("int32", words[0])), self._scale(words[1], tirx.truncdiv(pair, i32(GROUP // 2)))
        shift = bind(i32(16) - (pair & i32(1)) * 16)
        x = tirx.shift_right(tirx.shift_left(codes, bind(shift + 8)), i32(24))
        y = tirx.shift_right(tirx.shift_left(codes, shift), i32(24))
        return bind(cast("float32", x) * scale), bind(cast("float32", y) * scale)


def _round_half_away(x: Expr) -> Expr:
    """The nearest integer, int32; halves go away from zero. |x| must stay below 2**22."""
    return bind(cast("int32", bind(x + select(x < f32(0), f32(-_BELOW_HALF), f32(_BELOW_HALF)))))
