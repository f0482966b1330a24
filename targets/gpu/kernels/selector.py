"""DFlash2's candidate selector: the walk that makes each token fit the last, and how sure it is of each.

Knows nothing of how logits are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import Word
from dflashc.runtime.sampling import Purpose
from dflashc.targets.gpu.builder import (
    Expr,
    Kernel,
    KernelBuilder,
    barrier,
    bind,
    cast,
    const,
    f32,
    fma,
    i32,
    load,
    local,
    select,
    store,
)
from dflashc.targets.gpu.kernels.codes import LANES, PackedRow, group_words
from dflashc.targets.gpu.kernels.double_precision import exp_double
from dflashc.targets.gpu.kernels.elementary import LOG2_E, exp2
from dflashc.targets.gpu.kernels.embedding import block_values
from dflashc.targets.gpu.kernels.law import pick, sum_of
from dflashc.targets.gpu.kernels.reduction import add, tree
from dflashc.targets.gpu.kernels.sampling_state import number_of, position_of, random_number
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import BLOCK, PACKED_FORMATS, PackedFormat

_F64 = "float64"
_THREADS = 256
_SHARERS = 16
"""Threads that share the inner product of a candidate, a block of 32 elements each in turns."""


def select_candidates(traits: Traits, count: int, format_predecessor: str, format_successor: str) -> Kernel:
    """Left to right, each row's candidate by its score given the token before it. One workgroup.

    score(c) = logit(c) + sum_r predecessor[previous, r] * projected[row, r] * successor[c, r] over the `count` best
    logits c of the row; the previous token of row 0 is block[0]. Where the request's proposals are drawn, from
    softmax(score / temperature), else the best score wins, among equals the earlier candidate; so it does in a row with
    a score that is no number.

    Arguments
    ---------
    best, token : float32, int32 (M, count), of `candidates`
    projected : float32 (M, rank)
    block : int32
    state, sampling : see `sampling_state`; row i decides the token at its position
    predecessor, successor : packed tables (V, rank)
    ids : int32, written from element `first` on
    confidence : float32 (M,), written: the best score's share of softmax(score); 0 if no score is a number
    candidates, probabilities : int32, float64 (M, count), written: the law that the row's token is drawn from
    rows (M), rank, first : i32
    """
    layouts = [PACKED_FORMATS[name] for name in (format_predecessor, format_successor)]
    k = KernelBuilder(f"select_candidates_{count}_{format_predecessor}_{format_successor}", traits)
    with k.build([("best", "float32"), ("token", "int32"), ("projected", "float32"), ("block", "int32"),
                  ("state", "int32"), ("sampling", "uint64"), ("predecessor", "uint32"), ("successor", "uint32"),
                  ("ids", "int32"), ("confidence", "float32"), ("candidates", "int32"), ("probabilities", _F64),
                  ("rows", "i32"), ("rank", "i32"), ("first", "i32")]) as arguments:
        (best, token, projected, block, state, sampling, predecessor, successor, ids, confidence, candidates,
         probabilities, rows, rank, first) = arguments
        with k.workgroups(_THREADS) as (_, thread):
            parts, previous = k.shared(_THREADS, "float32"), local(1, "int32")
            walk = _Choice.declare(k, count, thread, sampling)
            store(previous, 0, load(block, 0))
            with T.serial(i32(0), rows) as row:
                before = _packed_row(traits, layouts[0], predecessor, bind(load(previous, 0)), rank)
                with T.serial(i32(0), i32(math.ceil(count * _SHARERS / _THREADS))) as turn:
                    place = bind(turn * (_THREADS // _SHARERS) + tirx.truncdiv(thread, i32(_SHARERS)))
                    entry = bind(row * count + tirx.min(place, i32(count - 1)))
                    after = _packed_row(traits, layouts[1], successor, bind(load(token, entry)), rank)
                    store(parts, thread, _share_of_product(before, after, projected, row, thread, rank))
                    barrier()
                    with T.If(tirx.all(tirx.truncmod(thread, i32(_SHARERS)) == 0, place < count)), T.Then():
                        edge = tree([bind(load(parts, thread + i)) for i in range(_SHARERS)], add)
                        store(walk.scores, place, load(best, entry) + edge)
                    barrier()
                chosen = walk.choose(position_of(state, row))
                store(previous, 0, load(token, row * count + chosen))
                with T.If(thread == 0), T.Then():
                    store(ids, first + row, load(previous, 0))
                    store(confidence, row, load(walk.confidence, 0))
                with walk.places() as place:
                    store(candidates, row * count + place, load(token, row * count + place))
                    store(probabilities, row * count + place, walk.share(place, chosen))
    return k.kernel


@dataclass(frozen=True)
class _Choice:
    """The choice among the scores of a row, which all threads make together."""

    count: int
    thread: Expr
    sampling: Expr
    scores: Expr
    shares: Expr
    weights: Expr
    confidence: Expr
    total: Expr
    chosen: Expr

    @classmethod
    def declare(cls, k: KernelBuilder, count: int, thread: Expr, sampling: Expr) -> _Choice:
        return cls(count, thread, sampling, k.shared(count, "float32"), k.shared(count, "float32"),
                   k.shared(count, _F64), k.shared(1, "float32"), k.shared(1, _F64), k.shared(1, "int32"))

    @contextmanager
    def places(self) -> Iterator[Expr]:
        """A loop over the places that are this thread's."""
        with T.serial(i32(0), i32(math.ceil(self.count / _THREADS))) as turn:
            place = bind(turn * _THREADS + self.thread)
            with T.If(place < self.count), T.Then():
                yield place

    def choose(self, position: Expr) -> Expr:
        """The place that is proposed for `position`; ends with a barrier. `total` is 0 where none was drawn."""
        best, largest = _best(self.scores, self.count)
        temperature = number_of(self.sampling, Word.DRAFT_TEMPERATURE)
        drawn = bind(temperature > const(0, _F64))
        with self.places() as place:
            score = bind(load(self.scores, place))
            store(self.shares, place, exp2(bind((score - largest) * f32(LOG2_E))))
            with T.If(drawn), T.Then():
                less = bind(cast(_F64, score) - cast(_F64, largest))
                store(self.weights, place, exp_double(bind(less / temperature)))
        barrier()
        with T.If(self.thread == 0), T.Then():
            share = _share_of_best(self.shares, self.count)
            store(self.confidence, 0, share)
            store(self.chosen, 0, best)
            store(self.total, 0, const(0, _F64))
            with T.If(tirx.all(drawn, share > f32(0))), T.Then():
                store(self.total, 0, sum_of(self.weights, i32(self.count)))
                number = random_number(self.sampling, Purpose.DRAFT, position)
                store(self.chosen, 0, pick(self.weights, i32(self.count), number))
        barrier()
        return bind(load(self.chosen, 0))

    def share(self, place: Expr, chosen: Expr) -> Expr:
        """The probability of a place: what it was drawn by, or all for the one chosen."""
        total, one = bind(load(self.total, 0)), const(1, _F64)
        result = local(1, _F64)
        store(result, 0, select(place == chosen, one, const(0, _F64)))
        with T.If(total > const(0, _F64)), T.Then():
            store(result, 0, load(self.weights, place) / total)
        return bind(load(result, 0))


def best_candidate(traits: Traits, count: int) -> Kernel:
    """The best logit of each row, and its share of the softmax over the `count` best. Workgroup = a row.

    Arguments
    ---------
    best, token : float32, int32 (M, count), of `candidates`
    ids : int32, written from element `first` on
    confidence : float32 (M,), written; 0 if no logit is a number
    first : i32
    """
    k = KernelBuilder(f"best_candidate_{count}", traits)
    with k.build([("best", "float32"), ("token", "int32"), ("ids", "int32"), ("confidence", "float32"),
                  ("first", "i32")]) as (best, token, ids, confidence, first), k.workgroups(count) as (row, thread):
        shares = k.shared(count, "float32")
        start = bind(row * count)
        less = bind(load(best, start + thread) - load(best, start))
        store(shares, thread, exp2(bind(less * f32(LOG2_E))))
        barrier()
        with T.If(thread == 0), T.Then():
            store(ids, first + row, load(token, start))
            store(confidence, row, _share_of_best(shares, count))
    return k.kernel


def _packed_row(traits: Traits, layout: PackedFormat, table: Expr, token: Expr, rank: Expr) -> PackedRow:
    start = bind(tirx.truncdiv(token, i32(LANES)) * group_words(layout, rank))
    return PackedRow(traits, layout, table, start, bind(tirx.truncmod(token, i32(LANES))), rank)


def _share_of_product(before: PackedRow, after: PackedRow, projected: Expr, row: Expr, thread: Expr,
                      rank: Expr) -> Expr:
    """This thread's part of sum_r before[r] * projected[row, r] * after[r]: every 16th block of 32 elements."""
    total = local(1, "float32")
    store(total, 0, f32(0))
    sharer = bind(tirx.truncmod(thread, i32(_SHARERS)))
    blocks = tirx.truncdiv(rank, i32(BLOCK))
    with T.serial(i32(0), bind(tirx.truncdiv(blocks - sharer + (_SHARERS - 1), i32(_SHARERS)))) as turn:
        block = bind(sharer + turn * _SHARERS)
        first = bind(row * rank + block * BLOCK)
        for element, (a, b) in enumerate(zip(block_values(before, block), block_values(after, block), strict=True)):
            store(total, 0, fma(bind(a * load(projected, first + element)), b, load(total, 0)))
    return bind(load(total, 0))


def _best(scores: Expr, count: int) -> tuple[Expr, Expr]:
    """The place of the first of the largest scores, and that score; found by every thread for itself."""
    best, where = local(1, "float32"), local(1, "int32")
    store(best, 0, f32(float("-inf")))
    store(where, 0, i32(0))
    with T.serial(i32(0), i32(count)) as place:
        score = bind(load(scores, place))
        better = bind(score > load(best, 0))
        store(where, 0, select(better, place, load(where, 0)))
        store(best, 0, select(better, score, load(best, 0)))
    return bind(load(where, 0)), bind(load(best, 0))


def _share_of_best(shares: Expr, count: int) -> Expr:
    """1 / the sum of all, 0 for a sum that is no number."""
    total = local(1, "float32")
    store(total, 0, f32(0))
    with T.serial(i32(0), i32(count)) as place:
        store(total, 0, load(total, 0) + load(shares, place))
    whole = bind(load(total, 0))
    return bind(select(whole > f32(0), f32(1) / whole, f32(0)))
