"""DFlash2's candidate selector: the greedy walk that makes each token fit the last. Knows nothing of logits' making."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Expr,
    Kernel,
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
from dflashc.targets.gpu.kernels.codes import LANES, PackedRow, group_words
from dflashc.targets.gpu.kernels.elementary import LOG2_E, exp2
from dflashc.targets.gpu.kernels.embedding import block_values
from dflashc.targets.gpu.kernels.reduction import add, tree
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import BLOCK, PACKED_FORMATS, PackedFormat

_THREADS = 256
_SHARERS = 16
"""Threads that share the inner product of a candidate, a block of 32 elements each in turns."""


def select_candidates(traits: Traits, count: int, format_predecessor: str, format_successor: str) -> Kernel:
    """Left to right, each row's candidate with the best score given the token before it. One workgroup.

    score(c) = logit(c) + sum_r predecessor[previous, r] * projected[row, r] * successor[c, r] over the `count` best
    logits c of the row; the previous token of row 0 is block[0]. Among equal scores the earlier candidate wins.

    Arguments
    ---------
    best, token : float32, int32 (M, count), of `candidates`
    projected : float32 (M, rank)
    block : int32
    predecessor, successor : packed tables (V, rank)
    ids : int32, written from element `first` on
    probability : float32 (M,), written: the softmax of the chosen candidate's score; 0 if no score is a number
    rows (M), rank, first : i32
    """
    layouts = [PACKED_FORMATS[name] for name in (format_predecessor, format_successor)]
    k = KernelBuilder(f"select_candidates_{count}_{format_predecessor}_{format_successor}", traits)
    with k.build([("best", "float32"), ("token", "int32"), ("projected", "float32"), ("block", "int32"),
                  ("predecessor", "uint32"), ("successor", "uint32"), ("ids", "int32"), ("probability", "float32"),
                  ("rows", "i32"), ("rank", "i32"), ("first", "i32")]) as arguments:
        best, token, projected, block, predecessor, successor, ids, probability, rows, rank, first = arguments
        with k.workgroups(_THREADS) as (_, thread):
            parts = k.shared(_THREADS, "float32")
            scores, shares = k.shared(count, "float32"), k.shared(count, "float32")
            previous = local(1, "int32")
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
                        store(scores, place, load(best, entry) + edge)
                    barrier()
                chosen, largest = _best(scores, count)
                store(previous, 0, load(token, row * count + chosen))
                with T.serial(i32(0), i32(math.ceil(count / _THREADS))) as turn:
                    place = bind(turn * _THREADS + thread)
                    with T.If(place < count), T.Then():
                        store(shares, place, exp2(bind((load(scores, place) - largest) * f32(LOG2_E))))
                barrier()
                with T.If(thread == 0), T.Then():
                    store(ids, first + row, load(previous, 0))
                    store(probability, row, _share_of_best(shares, count))
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
