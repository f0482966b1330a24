"""The request's sampler: penalties of recent tokens, filters, and a draw, as `runtime.sampling` defines them.

A row's token depends on its logits, its position and the tokens before it alone, so a round draws what plain decoding
would. Knows nothing of how logits are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import MOST_CANDIDATES, Word
from dflashc.runtime.sampling import Purpose
from dflashc.targets.cpu.builder import (
    Expr,
    Kernel,
    KernelBuilder,
    bind,
    cast,
    const,
    i64,
    load,
    local,
    reinterpret,
    store,
)
from dflashc.targets.cpu.kernels.random_numbers import uniform
from dflashc.targets.cpu.kernels.selector import Ranking
from dflashc.targets.cpu.kernels.vector_math import absolute, exp_double, rounded, select
from dflashc.targets.cpu.traits import Traits

_F64 = "float64"


def _number(sampling: Expr, word: Word) -> Expr:
    return bind(reinterpret(_F64, load(sampling, word)))


def _position(state: Expr, row: Expr) -> Expr:
    """Position of the token that a head's row `row` decides: behind the n committed ones and the run's rows up to it.

    state[0] is n, state[1] the row of the run that is the head's first.
    """
    return bind(load(state, 0) + load(state, 1) + row + 1)


def penalise(traits: Traits) -> Kernel:
    """Change the logits of recent tokens, in place; nothing where the request has no penalties. Unit = one row.

    Arguments
    ---------
    logits : float32 (M, V)
    tokens : int32; of the run's rows
    state : int64; see `_position`
    history : int32 (context,); the committed tokens
    sampling : int64; see `runtime.device_sampling.Word`
    count : int32 (M, V); scratch, of which only the places of recent tokens are touched
    columns (V) : i64
    """
    k = KernelBuilder("penalise", traits)
    with k.build():
        logits, tokens = k.buffer("logits", "float32"), k.buffer("tokens", "int32")
        state, history = k.buffer("state", "int64"), k.buffer("history", "int32")
        sampling, count = k.buffer("sampling", "int64"), k.buffer("count", "int32")
        columns = k.scalar("columns")
        window = bind(load(sampling, Word.WINDOW))
        with k.units() as row, T.If(window > i64(0)), T.Then():
            committed, end = bind(load(state, 0)), _position(state, row)
            first = bind(tirx.max(end - window, i64(0)))

            @contextmanager
            def recent() -> Iterator[Expr]:
                """The places of the recent tokens in row-wise buffers."""
                with T.serial(first, end) as position:
                    token = tirx.if_then_else(position < committed, load(history, position),
                                              load(tokens, position - committed))
                    yield bind(row * columns + cast("int64", token))

            with recent() as place:
                store(count, place, const(0, "int32"))
            with recent() as place:
                store(count, place, load(count, place) + const(1, "int32"))
            with recent() as place:
                times = bind(load(count, place))
                with T.If(times > const(0, "int32")), T.Then():  # a token's first occurrence
                    store(count, place, const(0, "int32"))
                    store(logits, place, _penalised(sampling, bind(load(logits, place)), times))
    return k.kernel


def _penalised(sampling: Expr, logit: Expr, times: Expr) -> Expr:
    """The logit of a token that occurred `times` times."""
    wide, penalty = bind(cast(_F64, logit)), _number(sampling, Word.REPEAT_PENALTY)
    repeated = bind(select(wide > const(0, _F64), wide / penalty, rounded(wide * penalty)))
    by_count = rounded(cast(_F64, times) * _number(sampling, Word.FREQUENCY_PENALTY))
    return cast("float32", repeated - (by_count + _number(sampling, Word.PRESENCE_PENALTY)))


def draw(traits: Traits) -> Kernel:
    """Draw the token of each row among its best logits: top-k, top-p, min-p, temperature, draw. Unit = one row.

    Arguments
    ---------
    value, index : float32, int32 (M, segments, 64), of `selector.top_candidates`
    state : int64; see `_position`
    sampling : int64; see `runtime.device_sampling.Word`
    ids : int32 (M,), written; -1 where the largest logit is no finite number
    segments : i64
    """
    k = KernelBuilder("draw", traits)
    with k.build():
        value, index = k.buffer("value", "float32"), k.buffer("index", "int32")
        state, sampling = k.buffer("state", "int64"), k.buffer("sampling", "int64")
        ids, segments = k.buffer("ids", "int32"), k.scalar("segments")
        law = _Law.declare()
        with k.units() as row:
            law.ranking.reset()
            size = bind(segments * MOST_CANDIDATES)
            with T.serial(row * size, (row + 1) * size) as entry:
                law.ranking.offer(bind(load(value, entry)), bind(load(index, entry)))
            law.keep(load(sampling, Word.CANDIDATES))
            law.filter_top_p(_number(sampling, Word.TOP_P))
            law.filter_min_p(_number(sampling, Word.LOG_MIN_P))
            law.weigh(_number(sampling, Word.TEMPERATURE))
            seed = bind(reinterpret("uint64", load(sampling, Word.SEED)))
            number = uniform(seed, Purpose.SAMPLE, _position(state, row))
            drawn = law.ranking.candidate(law.share_of(number))[1]
            largest = absolute(law.ranking.candidate(i64(0))[0])
            store(ids, row, select(largest < const(float("inf"), "float32"), drawn, const(-1, "int32")))
    return k.kernel


@dataclass(frozen=True)
class _Law:
    """The candidates that are left, the likeliest first, and their probabilities.

    Sums run from the likeliest on in float64, and no operation is fused: every feature level draws the same.
    """

    ranking: Ranking
    left: Expr
    probability: Expr

    @classmethod
    def declare(cls) -> _Law:
        return cls(Ranking.declare(MOST_CANDIDATES), local(1, "int64"), local(MOST_CANDIDATES, _F64))

    def keep(self, count: Expr) -> None:
        store(self.left, 0, count)

    def places(self) -> Expr:
        """The loop over what is left."""
        return T.serial(i64(0), bind(load(self.left, 0)))

    def logit(self, place: Expr) -> Expr:
        return bind(cast(_F64, self.ranking.candidate(place)[0]))

    def weigh(self, temperature: Expr) -> None:
        """Probabilities: the softmax of the logits over `temperature`."""
        largest, total = self.logit(i64(0)), local(1, _F64)
        store(total, 0, const(0, _F64))
        with self.places() as place:
            weight = exp_double(bind((self.logit(place) - largest) / temperature))
            store(self.probability, place, weight)
            store(total, 0, load(total, 0) + weight)
        sum_of_all = bind(load(total, 0))
        with self.places() as place:
            store(self.probability, place, load(self.probability, place) / sum_of_all)

    def filter_top_p(self, share: Expr) -> None:
        """Keep the likeliest until their probabilities reach `share`, one at least."""
        self.weigh(const(1, _F64))
        reached, kept = local(1, _F64), local(1, "int64")
        store(reached, 0, const(0, _F64))
        store(kept, 0, i64(0))
        with self.places() as place, T.If(tirx.any(place == i64(0), load(reached, 0) < share)), T.Then():
            store(reached, 0, load(reached, 0) + load(self.probability, place))
            store(kept, 0, place + 1)
        store(self.left, 0, load(kept, 0))

    def filter_min_p(self, log_share: Expr) -> None:
        """Keep those at least exp(log_share) as likely as the likeliest."""
        bound, kept = bind(self.logit(i64(0)) + log_share), local(1, "int64")
        store(kept, 0, i64(0))
        with self.places() as place, T.If(self.logit(place) >= bound), T.Then():
            store(kept, 0, place + 1)
        store(self.left, 0, load(kept, 0))

    def share_of(self, number: Expr) -> Expr:
        """The place whose share of [0, 1) holds `number`; empty shares at the end hold none."""
        total, reached, found = local(1, _F64), local(1, _F64), local(1, "int64")
        store(total, 0, const(0, _F64))
        with self.places() as place:
            store(total, 0, load(total, 0) + load(self.probability, place))
        whole = bind(load(total, 0))
        bound = bind(number * whole)
        store(reached, 0, const(0, _F64))
        store(found, 0, i64(-1))
        with self.places() as place:
            store(reached, 0, load(reached, 0) + load(self.probability, place))
            ends = tirx.any(load(reached, 0) > bound, load(reached, 0) >= whole)
            with T.If(tirx.all(load(found, 0) < i64(0), ends)), T.Then():
                store(found, 0, place)
        return bind(tirx.max(load(found, 0), i64(0)))
