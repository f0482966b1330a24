"""The request's sampler: penalties of recent tokens, filters, and a draw, as `runtime.sampling` defines them.

A row's token depends on its logits, its position and the tokens before it alone, so a round draws what plain decoding
would. Knows nothing of how logits are computed, nor of proposals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import MOST_CANDIDATES, Word
from dflashc.runtime.sampling import Purpose
from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, cast, const, i64, load, local, store
from dflashc.targets.cpu.kernels.law import Law
from dflashc.targets.cpu.kernels.sampling_state import decided_position, parameter, random_number
from dflashc.targets.cpu.kernels.selector import Ranking
from dflashc.targets.cpu.kernels.vector_math import absolute, rounded, select
from dflashc.targets.cpu.traits import Traits

_F64 = "float64"


def penalise(traits: Traits) -> Kernel:
    """Change the logits of recent tokens, in place; nothing where the request has no penalties. Unit = one row.

    Arguments
    ---------
    logits : float32 (M, V)
    tokens : int32; of the run's rows
    state : int64; see `decided_position`
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
            committed, end = bind(load(state, 0)), decided_position(state, row)
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
    wide, penalty = bind(cast(_F64, logit)), parameter(sampling, Word.REPEAT_PENALTY)
    repeated = bind(select(wide > const(0, _F64), wide / penalty, rounded(wide * penalty)))
    by_count = rounded(cast(_F64, times) * parameter(sampling, Word.FREQUENCY_PENALTY))
    return cast("float32", repeated - (by_count + parameter(sampling, Word.PRESENCE_PENALTY)))


def draw(traits: Traits) -> Kernel:
    """Draw the token of each row from the request's law. Unit = one row.

    Arguments
    ---------
    value, index : float32, int32 (M, segments, 64), of `selector.top_candidates`
    state : int64; see `decided_position`
    sampling : int64; see `runtime.device_sampling.Word`
    ids : int32 (M,), written; -1 where the largest logit is no finite number
    segments : i64
    """
    k = KernelBuilder("draw", traits)
    with k.build():
        value, index = k.buffer("value", "float32"), k.buffer("index", "int32")
        state, sampling = k.buffer("state", "int64"), k.buffer("sampling", "int64")
        ids, segments = k.buffer("ids", "int32"), k.scalar("segments")
        law = RequestLaw.declare()
        with k.units() as row:
            law.ranking.gather(value, index, row, segments)
            law.filter(sampling)
            number = random_number(sampling, Purpose.SAMPLE, decided_position(state, row))
            store(ids, row, law.unless_broken(law.draw(number)))
    return k.kernel


@dataclass(frozen=True)
class RequestLaw:
    """The law that a request's sampler makes of a row's logits: top-k, top-p, min-p, temperature, in this order.

    Candidates are in order, the likeliest first.
    """

    ranking: Ranking
    law: Law

    @classmethod
    def declare(cls) -> RequestLaw:
        return cls(Ranking.declare(MOST_CANDIDATES), Law.declare(MOST_CANDIDATES))

    def filter(self, sampling: Expr) -> None:
        """Leave what the request allows, with its probabilities."""
        self.law.keep(load(sampling, Word.CANDIDATES))
        self._filter_top_p(parameter(sampling, Word.TOP_P))
        self._filter_min_p(parameter(sampling, Word.LOG_MIN_P))
        self._weigh(parameter(sampling, Word.TEMPERATURE))

    def token(self, place: Expr) -> Expr:
        return self.ranking.candidate(place)[1]

    def draw(self, number: Expr) -> Expr:
        """The token whose share of [0, 1) holds `number`."""
        return self.token(self.law.draw(number))

    def unless_broken(self, token: Expr) -> Expr:
        """`token`, or -1 where the largest logit is no finite number."""
        largest = absolute(self.ranking.candidate(i64(0))[0])
        return select(largest < const(float("inf"), "float32"), token, const(-1, "int32"))

    def _logit(self, place: Expr) -> Expr:
        return bind(cast(_F64, self.ranking.candidate(place)[0]))

    def _weigh(self, temperature: Expr) -> None:
        self.law.weigh(self._logit, self._logit(i64(0)), temperature)

    def _filter_top_p(self, share: Expr) -> None:
        """Keep the likeliest until their probabilities reach `share`, one at least."""
        self._weigh(const(1, _F64))
        reached, kept = local(1, _F64), local(1, "int64")
        store(reached, 0, const(0, _F64))
        store(kept, 0, i64(0))
        with self.law.places() as place, T.If(tirx.any(place == i64(0), load(reached, 0) < share)), T.Then():
            store(reached, 0, load(reached, 0) + self.law.share(place))
            store(kept, 0, place + 1)
        self.law.keep(load(kept, 0))

    def _filter_min_p(self, log_share: Expr) -> None:
        """Keep those at least exp(log_share) as likely as the likeliest."""
        bound, kept = bind(self._logit(i64(0)) + log_share), local(1, "int64")
        store(kept, 0, i64(0))
        with self.law.places() as place, T.If(self._logit(place) >= bound), T.Then():
            store(kept, 0, place + 1)
        self.law.keep(load(kept, 0))
