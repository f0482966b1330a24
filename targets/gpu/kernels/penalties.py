"""The candidates of a sampled row: its logits with the penalties of recent tokens, and the best of each segment.

A segment's workgroup looks through all recent tokens for those of its own. Knows nothing of how a token is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import Word
from dflashc.targets.gpu.builder import (
    Expr,
    Kernel,
    KernelBuilder,
    barrier,
    bind,
    cast,
    const,
    i32,
    load,
    local,
    select,
    state_word,
    store,
)
from dflashc.targets.gpu.kernels.candidates import SEGMENT, THREADS, Lists, read_segment, segment_of, write_best
from dflashc.targets.gpu.kernels.sampling_state import count_of, number_of, position_of
from dflashc.targets.gpu.traits import Traits

_F64 = "float64"
_CHUNK = SEGMENT
"""Recent tokens that are looked through at once; those of the segment fit where its candidates' ids come later."""


def penalised_candidates(traits: Traits, count: int) -> Kernel:
    """`top_candidates` of the logits after the request's penalties. Workgroup = a segment: M * segments, row by row.

    Arguments
    ---------
    logits : float32 (M, V); left as they are
    tokens : int32; of the run's rows
    state : the state block; see `sampling_state.position_of`
    history : int32 (context,); the committed tokens
    sampling : uint64; see `runtime.device_sampling.Word`
    value, index : float32, int32 (M, segments, count), written; as in `top_candidates`
    columns (V) : i32
    """
    k = KernelBuilder(f"penalised_candidates_{count}", traits)
    with k.build([("logits", "float32"), ("tokens", "int32"), ("state", "int32"), ("history", "int32"),
                  ("sampling", "uint64"), ("value", "float32"), ("index", "int32"), ("columns", "i32")]) as arguments:
        logits, tokens, state, history, sampling, value, index, columns = arguments
        with k.workgroups(THREADS) as (group, thread):
            lists = Lists.declare(k, count, thread)
            recent = _Recent(lists.ids, k.shared(SEGMENT, "int32"), k.shared(THREADS, "int32"), thread)
            row, first = segment_of(group, columns)
            read_segment(lists, logits, row, first, columns)
            window = count_of(sampling, Word.WINDOW)
            with T.If(window > 0), T.Then():
                end, committed = position_of(state, row), state_word(state, 0)
                recent.count(tokens, history, committed, bind(tirx.max(end - window, i32(0))), end, first)
                _penalise(lists, recent.counts, sampling)
            _number(lists, first)
            barrier()
            write_best(lists, count, value, index, group)
    return k.kernel


@dataclass(frozen=True)
class _Recent:
    """How often each token of a segment is among the recent ones: `counts`, of which each thread owns every 256th.

    `found` has room for a chunk of tokens, `sums` for a number of each thread.
    """

    found: Expr
    counts: Expr
    sums: Expr
    thread: Expr

    def count(self, tokens: Expr, history: Expr, committed: Expr, begin: Expr, end: Expr, first: Expr) -> None:
        """Count the tokens at positions [begin, end) that lie in the segment from token `first` on.

        Each thread reads a few positions; what they find is put together without gaps, and every thread counts what
        is its own.
        """
        for place in range(0, SEGMENT, THREADS):
            store(self.counts, self.thread + place, i32(0))
        places = local(_CHUNK // THREADS, "int32")
        with T.serial(i32(0), bind(tirx.truncdiv(end - begin + (_CHUNK - 1), i32(_CHUNK)))) as chunk:
            for turn in range(_CHUNK // THREADS):
                position = bind(begin + chunk * _CHUNK + turn * THREADS + self.thread)
                store(places, turn, i32(-1))
                with T.If(position < committed), T.Then():
                    store(places, turn, load(history, position) - first)
                with T.If(tirx.all(position >= committed, position < end)), T.Then():
                    store(places, turn, load(tokens, position - committed) - first)
            inside = [bind(_is_place(bind(load(places, turn)))) for turn in range(_CHUNK // THREADS)]
            total = self._gather(places, inside)
            with T.serial(i32(0), total) as entry:
                place = bind(load(self.found, entry))
                with T.If((place & i32(THREADS - 1)) == self.thread), T.Then():
                    store(self.counts, place, load(self.counts, place) + 1)
            barrier()

    def _gather(self, places: Expr, inside: list[Expr]) -> Expr:
        """All threads' places that are `inside` into `found`, without gaps; how many there are."""
        own = bind(sum((cast("int32", i) for i in inside[1:]), cast("int32", inside[0])))
        store(self.sums, self.thread, own)
        barrier()
        distance = 1
        while distance < THREADS:  # the sum of all threads up to this one (Hillis and Steele, 1986)
            before = local(1, "int32")
            store(before, 0, i32(0))
            with T.If(self.thread >= distance), T.Then():
                store(before, 0, load(self.sums, self.thread - distance))
            barrier()
            store(self.sums, self.thread, load(self.sums, self.thread) + load(before, 0))
            barrier()
            distance *= 2
        target = local(1, "int32")
        store(target, 0, load(self.sums, self.thread) - own)
        for turn, is_inside in enumerate(inside):
            with T.If(is_inside), T.Then():
                store(self.found, load(target, 0), load(places, turn))
                store(target, 0, load(target, 0) + 1)
        barrier()
        return bind(load(self.sums, THREADS - 1))


def _is_place(place: Expr) -> Expr:
    return tirx.all(place >= 0, place < SEGMENT)


def _penalise(lists: Lists, counts: Expr, sampling: Expr) -> None:
    """Change the logits of the tokens that occur; every thread its own."""
    with lists.each(SEGMENT) as place:
        times = bind(load(counts, place))
        with T.If(times > 0), T.Then():
            lists.put(place, _penalised(sampling, bind(load(lists.values, place)), times), i32(0))


def _penalised(sampling: Expr, logit: Expr, times: Expr) -> Expr:
    """The logit of a token that occurred `times` times."""
    wide, penalty = bind(cast(_F64, logit)), number_of(sampling, Word.REPEAT_PENALTY)
    repeated = bind(select(wide > const(0, _F64), wide / penalty, wide * penalty))
    by_count = bind(cast(_F64, times) * number_of(sampling, Word.FREQUENCY_PENALTY))
    return bind(cast("float32", repeated - (by_count + number_of(sampling, Word.PRESENCE_PENALTY))))


def _number(lists: Lists, first: Expr) -> None:
    """Give every candidate its token; the room was used for something else."""
    with lists.each(SEGMENT) as place:
        store(lists.ids, place, first + place)
