"""Softmax attention of 8 queries over parts of 256 keys: a key per thread for the scores, two dimensions per thread for
the values.

Every query is computed in an order that depends on nothing but the positions of its own keys: a part that a query does
not see leaves what is known of it as it was, to the last bit. Scores are in units of ln 2, so that 2^x serves as the
exponential. Knows nothing of where queries come from, which keys they see, nor of how keys and values are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Expr,
    KernelBuilder,
    barrier,
    bind,
    f32,
    fma,
    i32,
    load,
    local,
    select,
    store,
)
from dflashc.targets.gpu.kernels.attention_reach import PART
from dflashc.targets.gpu.kernels.elementary import exp2
from dflashc.targets.gpu.kernels.kv_type import QUERIES, KvType, Place
from dflashc.targets.gpu.kernels.reduction import add, tree

THREADS = 256

LOWEST = -3.0e38  # a maximum below any score; finite, so that differences are numbers
_LANES = THREADS // QUERIES  # threads that share the keys of a query in the softmax
_VALUES = 4  # values whose loads are in flight at the same time


@dataclass(frozen=True)
class Keys:
    """The keys of a part that any of the queries sees: [begin, end) counted from the part's start, which is `place`."""

    begin: Expr
    end: Expr
    place: Place


class Softmax:
    """What a workgroup knows of its queries after some parts.

    The caller hands the scaled queries to `kv`, which must be that of the kernel's caches.
    """

    def __init__(self, k: KernelBuilder, size: int, kv: KvType, thread: Expr) -> None:
        self.size, self.pairs, self.kv, self.thread = size, size // 2, kv, thread
        self.slices = 1 << int(math.log2(THREADS // self.pairs))
        kv.declare_queries(k)
        self._weights = k.shared(PART * QUERIES, "float32")  # scores, then exponentials: [key][query]
        self._maxima = k.shared(THREADS, "float32")  # [lane][query]
        self._decay = k.shared(QUERIES, "float32")
        self._known = local(2, "float32")  # of query thread mod 8: the maximum, and this lane's share of the sum
        self._scores = local(QUERIES, "float32")
        self._values = local(2 * QUERIES, "float32")  # of the thread's two dimensions, over its slice of the keys
        self.query = bind(tirx.truncmod(thread, i32(QUERIES)))
        self.lane = bind(tirx.truncdiv(thread, i32(QUERIES)))
        self.pair = bind(tirx.truncmod(thread, i32(self.pairs)))
        self.slice = bind(tirx.truncdiv(thread, i32(self.pairs)))

    def reset(self) -> None:
        """No key seen yet."""
        store(self._known, 0, f32(LOWEST))
        store(self._known, 1, f32(0))
        for i in range(2 * QUERIES):
            store(self._values, i, f32(0))

    def add_part(self, keys: Expr, values: Expr, part: Keys, first: Expr, last: Expr) -> None:
        """Take in a part. Query `self.query` sees its keys `first` to `last`, counted from its start; none if last <
        first. Every thread of the workgroup must call it, after `kv.take_queries`.
        """
        self._emit_scores(keys, part)
        barrier()
        self._emit_weights(first, last)
        barrier()
        self._emit_values(values, part)
        barrier()

    def _emit_scores(self, keys: Expr, part: Keys) -> None:
        with T.If(tirx.all(self.thread >= part.begin, self.thread < part.end)), T.Then():
            self.kv.scores(keys, part.place.ahead(self.thread), self._scores)
            for q in range(QUERIES):
                store(self._weights, self.thread * QUERIES + q, load(self._scores, q))

    def _emit_weights(self, first: Expr, last: Expr) -> None:
        """Scores to exp(score - maximum), 0 where the query does not see the key; update maximum and sum."""
        count = PART // _LANES
        seen, scores = [], []
        for i in range(count):
            key = bind(self.lane + i * _LANES)
            seen.append(bind(tirx.all(key >= first, key <= last)))
            scores.append(bind(select(seen[-1], load(self._weights, self.thread + i * THREADS), f32(LOWEST))))
        store(self._maxima, self.thread, tree(scores, tirx.max))
        barrier()
        highest = tree([bind(load(self._maxima, self.query + i * QUERIES)) for i in range(_LANES)], tirx.max)
        before = bind(load(self._known, 0))
        maximum = bind(tirx.max(before, highest))
        decay = exp2(bind(before - maximum))
        weights = [bind(select(s, exp2(bind(score - maximum)), f32(0))) for s, score in zip(seen, scores, strict=True)]
        for i, weight in enumerate(weights):
            store(self._weights, self.thread + i * THREADS, weight)
        store(self._known, 0, maximum)
        store(self._known, 1, fma(load(self._known, 1), decay, tree(weights, add)))
        with T.If(self.lane == i32(0)), T.Then():
            store(self._decay, self.query, decay)

    def _emit_values(self, values: Expr, part: Keys) -> None:
        step = self.slices * _VALUES
        with T.If(self.slice < self.slices), T.Then():
            for q in range(QUERIES):
                decay = bind(load(self._decay, q))
                for at in (2 * q, 2 * q + 1):
                    store(self._values, at, load(self._values, at) * decay)
            begin, end = tirx.truncdiv(part.begin, i32(step)), tirx.truncdiv(part.end + (step - 1), i32(step))
            with T.serial(begin, end) as turn:
                first = bind(turn * step + self.slice)
                own = [bind(first + i * self.slices) for i in range(_VALUES)]
                # a key from `end` on has weight 0, but its value may be anything: read another in its place
                words = [self.kv.load_value(values, part.place.ahead(tirx.min(key, part.end - 1)), self.pair)
                         for key in own]
                for key, word in zip(own, words, strict=True):
                    pair = self.kv.value(word, self.pair)
                    for q in range(QUERIES):
                        weight = bind(load(self._weights, key * QUERIES + q))
                        for half, value in enumerate(pair):
                            at = 2 * q + half
                            store(self._values, at, fma(weight, value, load(self._values, at)))

    def finish(self, sums: Expr, result: Expr, place: Expr) -> None:
        """Store what is known of each query. All threads must call it; `place(query)` gives where, -1 for nowhere.

        Parameters
        ----------
        sums : float32 [place][2]
            Maximum and sum of exponentials.
        result : float32 [place][D]
            Sum of exponentials times values.
        """
        store(self._maxima, self.thread, load(self._known, 1))
        barrier()
        with T.If(self.lane == i32(0)), T.Then():
            at = bind(place(self.query))
            with T.If(at >= 0), T.Then():
                lanes = [bind(load(self._maxima, self.query + i * QUERIES)) for i in range(_LANES)]
                store(sums, at * 2, load(self._known, 0))
                store(sums, at * 2 + 1, tree(lanes, add))
        for half in range(2):  # the slices of one of the two dimensions fit into the memory of the weights
            for q in range(QUERIES):
                store(self._weights, self.thread + q * THREADS, load(self._values, 2 * q + half))
            barrier()
            for turn in range(math.ceil(QUERIES * self.pairs / THREADS)):
                entry = bind(self.thread + turn * THREADS)
                query, pair = bind(tirx.truncdiv(entry, i32(self.pairs))), bind(tirx.truncmod(entry, i32(self.pairs)))
                with T.If(entry < QUERIES * self.pairs), T.Then():
                    at = bind(place(query))
                    with T.If(at >= 0), T.Then():
                        shares = [bind(load(self._weights, query * THREADS + s * self.pairs + pair))
                                  for s in range(self.slices)]
                        store(result, at * self.size + pair * 2 + half, tree(shares, add))
            barrier()
