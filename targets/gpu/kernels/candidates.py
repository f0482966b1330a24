"""The best logits of each row: sorted lists of its segments, and the merge of a row's lists.

Larger logits come first and, among equals, lower ids; NaN and minus infinity never enter. That order is total, so the
result does not depend on how the work is cut. Knows nothing of how logits are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Expr,
    Kernel,
    KernelBuilder,
    barrier,
    bind,
    f32,
    i32,
    load,
    local,
    select,
    store,
)
from dflashc.targets.gpu.traits import Traits

THREADS = 256
SEGMENT = 2048
"""Logits of a workgroup of `top_candidates`: what it sorts in shared memory, 8 a thread."""

_LOWEST = float("-inf")


@dataclass(frozen=True)
class Lists:
    """SEGMENT candidates in shared memory, as lists of `run`, a power of two.

    Places without a candidate hold minus infinity and some id. Every method is called by all threads of the workgroup
    and ends with a barrier.
    """

    values: Expr
    ids: Expr
    run: int
    thread: Expr

    @classmethod
    def declare(cls, k: KernelBuilder, count: int, thread: Expr) -> Lists:
        """Room for lists of at least `count` candidates."""
        run = 1 << (count - 1).bit_length()
        return cls(k.shared(SEGMENT, "float32"), k.shared(SEGMENT, "int32"), run, thread)

    @property
    def count(self) -> int:
        """How many lists there are."""
        return SEGMENT // self.run

    def put(self, place: Expr, value: Expr, token: Expr) -> None:
        """Fill a place; without a barrier."""
        store(self.values, place, select(value > f32(_LOWEST), value, f32(_LOWEST)))  # NaN is no candidate
        store(self.ids, place, token)

    def sort(self) -> None:
        """Sort every list by Batcher's bitonic network (1968): runs of 2, 4, … places, every other one backwards."""
        with T.serial(i32(0), i32(_log2(self.run))) as level, T.serial(i32(0), level + 1) as step:
            stride = bind(tirx.shift_left(i32(1), level - step))
            with self.each(SEGMENT // 2) as pair:
                first = bind(_with_gap(pair, stride))
                second = bind(first + stride)
                forwards = bind((first & i32(self.run - 1) & tirx.shift_left(i32(2), level)) == i32(0))
                self._order(bind(select(forwards, first, second)), bind(select(forwards, second, first)))
            barrier()

    def merge(self) -> None:
        """Leave the best `run` of all lists, sorted, in the first; the lists must be sorted.

        Of two sorted lists, the better of each place of one and the mirrored place of the other are the best, in
        bitonic order.
        """
        run = self.run
        with T.serial(i32(0), i32(_log2(self.count))) as level:
            survivors = bind(tirx.shift_right(i32(SEGMENT // 2), level))
            with self.each(survivors) as survivor:
                here = self._survivor(survivor, level)
                within = survivor & i32(run - 1)
                there = bind(here - within + tirx.shift_left(i32(run), level) + (run - 1) - within)
                with T.If(self._is_better(there, here)), T.Then():
                    store(self.values, here, load(self.values, there))
                    store(self.ids, here, load(self.ids, there))
            barrier()
            with T.serial(i32(0), i32(_log2(run))) as step:
                stride = bind(tirx.shift_right(i32(run // 2), step))
                with self.each(bind(tirx.shift_right(survivors, i32(1)))) as pair:
                    first = self._survivor(bind(_with_gap(pair, stride)), level)
                    self._order(first, bind(first + stride))
                barrier()

    def _survivor(self, number: Expr, level: Expr) -> Expr:
        """The place of candidate `number` of the lists that stay at a level of `merge`: every second, fourth, … one."""
        within = bind(number & i32(self.run - 1))
        return bind(tirx.shift_left(number - within, level + 1) + within)

    def candidate(self, place: Expr) -> tuple[Expr, Expr]:
        """Value and id at a place; (-inf, 0) where there is none."""
        value = bind(load(self.values, place))
        return value, bind(select(value > f32(_LOWEST), load(self.ids, place), i32(0)))

    def _is_better(self, a: Expr, b: Expr) -> Expr:
        """Whether the candidate at place a comes before that at place b."""
        x, y = bind(load(self.values, a)), bind(load(self.values, b))
        i, j = bind(load(self.ids, a)), bind(load(self.ids, b))
        return bind(tirx.any(x > y, tirx.all(x == y, i < j)))

    def _order(self, first: Expr, second: Expr) -> None:
        """Exchange two candidates where the second is better."""
        with T.If(self._is_better(second, first)), T.Then():
            for buffer in (self.values, self.ids):
                moved = bind(load(buffer, first))
                store(buffer, first, load(buffer, second))
                store(buffer, second, moved)

    @contextmanager
    def each(self, count: Expr | int) -> Iterator[Expr]:
        """Share the numbers below `count` out among the threads."""
        whole = isinstance(count, int) and count % THREADS == 0
        turns = i32(-(-count // THREADS)) if isinstance(count, int) else bind(
            tirx.truncdiv(count + (THREADS - 1), i32(THREADS)))
        with T.serial(i32(0), turns) as turn:
            number = bind(turn * THREADS + self.thread)
            if whole:
                yield number
                return
            with T.If(number < count), T.Then():
                yield number


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _with_gap(number: Expr, stride: Expr) -> Expr:
    """Number `number` of the places whose partner `stride` further on is in the same run of 2 * stride."""
    return number * 2 - (number & (stride - 1))


def segments_of(columns: int) -> int:
    """Segments of a row of `columns` logits."""
    return -(-columns // SEGMENT)


def top_candidates(traits: Traits, count: int) -> Kernel:
    """The `count` best logits of each segment of a row. Workgroup = a segment: M * segments, row by row.

    Arguments: logits float32 (M, V), value float32 (M, segments, count), index int32 (M, segments, count), both best
    first, (-inf, 0) where a segment has fewer; then the scalar columns (V).
    """
    k = KernelBuilder(f"top_candidates_{count}", traits)
    with k.build([("logits", "float32"), ("value", "float32"), ("index", "int32"), ("columns", "i32")]) as arguments:
        logits, value, index, columns = arguments
        with k.workgroups(THREADS) as (group, thread):
            lists = Lists.declare(k, count, thread)
            row, first = segment_of(group, columns)
            read_segment(lists, logits, row, first, columns)
            barrier()
            write_best(lists, count, value, index, group)
    return k.kernel


def segment_of(group: Expr, columns: Expr) -> tuple[Expr, Expr]:
    """A workgroup's row, and the first token of its segment."""
    segments = bind(tirx.truncdiv(columns + (SEGMENT - 1), i32(SEGMENT)))
    row = bind(tirx.truncdiv(group, segments))
    return row, bind((group - row * segments) * SEGMENT)


def read_segment(lists: Lists, logits: Expr, row: Expr, first: Expr, columns: Expr) -> None:
    """A segment's logits into `lists`, each thread its own places (thread, thread + THREADS, …); without a barrier."""
    start = bind(row * columns + first)
    held = local(1, "float32")
    with T.serial(i32(0), i32(SEGMENT // THREADS)) as turn:
        place = bind(turn * THREADS + lists.thread)
        store(held, 0, f32(_LOWEST))
        with T.If(first + place < columns), T.Then():
            store(held, 0, load(logits, start + place))
        lists.put(place, bind(load(held, 0)), bind(first + place))


def write_best(lists: Lists, count: int, value: Expr, index: Expr, group: Expr) -> None:
    """Sort what `lists` holds, and store the best `count` as list number `group` of the results."""
    lists.sort()
    lists.merge()
    write_first(lists, count, value, index, group)


def write_first(lists: Lists, count: int, value: Expr, index: Expr, number: Expr) -> None:
    """Store the first `count` candidates as list `number` of the results."""
    with lists.each(count) as place:
        best, token = lists.candidate(place)
        store(value, number * count + place, best)
        store(index, number * count + place, token)


def merge_candidates(traits: Traits, count: int) -> Kernel:
    """The `count` best candidates of each row, out of its segments' lists. Workgroup = a row.

    Arguments: value float32 (M, segments, count), index int32 (M, segments, count), as `top_candidates` leaves them,
    best float32 (M, count), token int32 (M, count); then the scalar segments.
    """
    k = KernelBuilder(f"merge_candidates_{count}", traits)
    arguments = [("value", "float32"), ("index", "int32"), ("best", "float32"), ("token", "int32"), ("segments", "i32")]
    with k.build(arguments) as (value, index, best, token, segments), k.workgroups(THREADS) as (row, thread):
        lists = Lists.declare(k, count, thread)
        new = lists.count - 1  # beside the best so far, which are the first list
        with lists.each(lists.run) as place:
            lists.put(place, f32(_LOWEST), i32(0))
        with T.serial(i32(0), bind(tirx.truncdiv(segments + (new - 1), i32(new)))) as turn:
            _read_lists(lists, count, value, index, row, segments, bind(turn * new))
            barrier()
            lists.merge()
        write_first(lists, count, best, token, row)
    return k.kernel


def _read_lists(lists: Lists, count: int, value: Expr, index: Expr, row: Expr, segments: Expr, first: Expr) -> None:
    """The lists of the row's segments from `first` on, behind the first list; as many as there is room for."""
    number, held = local(1, "int32"), local(1, "float32")
    with T.serial(i32(0), i32(SEGMENT // THREADS)) as turn:
        place = bind(turn * THREADS + lists.thread)
        within = bind(place & i32(lists.run - 1))
        segment = bind(first + tirx.shift_right(place, i32(_log2(lists.run))) - 1)
        with T.If(place >= lists.run), T.Then():
            store(held, 0, f32(_LOWEST))
            store(number, 0, i32(0))
            with T.If(tirx.all(segment < segments, within < count)), T.Then():
                entry = bind((row * segments + segment) * count + within)
                store(held, 0, load(value, entry))
                store(number, 0, load(index, entry))
            lists.put(place, bind(load(held, 0)), bind(load(number, 0)))
