"""The law over a row's candidates: top-k, top-p, min-p, temperature, and the token that a random number picks.

Sums run in float64 from the likeliest candidate on, so every device draws the same. Knows nothing of how logits are
computed, nor of what the tokens are for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import MOST_CANDIDATES, Word
from dflashc.targets.gpu.builder import (
    Expr,
    KernelBuilder,
    barrier,
    bind,
    cast,
    const,
    f32,
    i32,
    load,
    local,
    select,
    store,
)
from dflashc.targets.gpu.kernels.double_precision import exp_double
from dflashc.targets.gpu.kernels.sampling_state import count_of, number_of

_F64 = "float64"


@dataclass(frozen=True)
class RequestLaw:
    """The candidates that a request's sampler leaves of a row, the likeliest first, and their probabilities.

    There is a thread for each candidate. `filter` is called by all of them, the methods that draw by one.
    """

    thread: Expr
    best: Expr
    token: Expr
    first: Expr
    logits: Expr
    probability: Expr
    left: Expr
    total: Expr

    @classmethod
    def declare(cls, k: KernelBuilder, thread: Expr, row: Expr, best: Expr, token: Expr) -> RequestLaw:
        """Of the logits `best` and ids `token` (M, 64) of a row, sorted."""
        logits, probability = k.shared(MOST_CANDIDATES, _F64), k.shared(MOST_CANDIDATES, _F64)
        left, total = k.shared(1, "int32"), k.shared(1, _F64)
        return cls(thread, best, token, bind(row * MOST_CANDIDATES), logits, probability, left, total)

    def filter(self, sampling: Expr) -> None:
        """Leave what the request allows, with its probabilities; ends with a barrier."""
        store(self.logits, self.thread, cast(_F64, load(self.best, self.first + self.thread)))
        with T.If(self.thread == 0), T.Then():
            store(self.left, 0, count_of(sampling, Word.CANDIDATES))
        barrier()
        self._filter_top_p(number_of(sampling, Word.TOP_P))
        self._filter_min_p(number_of(sampling, Word.LOG_MIN_P))
        self._weigh(number_of(sampling, Word.TEMPERATURE))

    def is_left(self) -> Expr:
        """Whether this thread's candidate is among what is left."""
        return bind(self.thread < load(self.left, 0))

    def token_at(self, place: Expr) -> Expr:
        return bind(load(self.token, self.first + place))

    def draw(self, number: Expr) -> Expr:
        """The token whose share of [0, 1) holds `number`."""
        return self.token_at(pick(self.probability, load(self.left, 0), number))

    def unless_broken(self, token: Expr) -> Expr:
        """`token`, or -1 where the largest logit is no finite number."""
        largest = bind(load(self.best, self.first))
        finite = tirx.all(largest > f32(float("-inf")), largest < f32(float("inf")))
        return bind(select(finite, token, i32(-1)))

    def _weigh(self, temperature: Expr) -> None:
        """Probabilities: the softmax of the logits over `temperature`."""
        is_left = self.is_left()
        with T.If(is_left), T.Then():
            weight = exp_double(bind((load(self.logits, self.thread) - load(self.logits, 0)) / temperature))
            store(self.probability, self.thread, weight)
        barrier()
        with T.If(self.thread == 0), T.Then():
            store(self.total, 0, sum_of(self.probability, load(self.left, 0)))
        barrier()
        with T.If(is_left), T.Then():
            store(self.probability, self.thread, load(self.probability, self.thread) / load(self.total, 0))
        barrier()

    def _filter_top_p(self, share: Expr) -> None:
        """Keep the likeliest until their probabilities reach `share`, one at least."""
        self._weigh(const(1, _F64))
        with T.If(self.thread == 0), T.Then():
            reached, kept = local(1, _F64), local(1, "int32")
            store(reached, 0, const(0, _F64))
            store(kept, 0, i32(0))
            with T.serial(i32(0), bind(load(self.left, 0))) as place, \
                    T.If(tirx.any(place == 0, load(reached, 0) < share)), T.Then():
                store(reached, 0, load(reached, 0) + load(self.probability, place))
                store(kept, 0, place + 1)
            store(self.left, 0, load(kept, 0))
        barrier()

    def _filter_min_p(self, log_share: Expr) -> None:
        """Keep those at least exp(log_share) as likely as the likeliest."""
        with T.If(self.thread == 0), T.Then():
            bound, kept = bind(load(self.logits, 0) + log_share), local(1, "int32")
            store(kept, 0, i32(0))
            with T.serial(i32(0), bind(load(self.left, 0))) as place, \
                    T.If(load(self.logits, place) >= bound), T.Then():
                store(kept, 0, place + 1)
            store(self.left, 0, load(kept, 0))
        barrier()


def sum_of(shares: Expr, count: Expr) -> Expr:
    """The sum of the first `count` shares, float64."""
    total = local(1, _F64)
    store(total, 0, const(0, _F64))
    with T.serial(i32(0), bind(count)) as place:
        store(total, 0, load(total, 0) + load(shares, place))
    return bind(load(total, 0))


def pick(shares: Expr, count: Expr, number: Expr) -> Expr:
    """The place whose share of [0, 1) holds `number`; shares need not add up to 1, and empty ones hold none."""
    count = bind(count)
    whole = sum_of(shares, count)
    bound = bind(number * whole)
    reached, found = local(1, _F64), local(1, "int32")
    store(reached, 0, const(0, _F64))
    store(found, 0, i32(-1))
    with T.serial(i32(0), count) as place:
        store(reached, 0, load(reached, 0) + load(shares, place))
        ends = tirx.any(load(reached, 0) > bound, load(reached, 0) >= whole)
        with T.If(tirx.all(load(found, 0) < 0, ends)), T.Then():
            store(found, 0, place)
    return bind(tirx.max(load(found, 0), i32(0)))
