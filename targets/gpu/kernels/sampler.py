"""The request's sampler: penalties of recent tokens, filters, and a draw, as `runtime.sampling` defines them.

A row's token depends on its logits, its position and the tokens before it alone, so a round draws what plain decoding
would. Sums run in float64 from the likeliest token on, so every device draws the same. Knows nothing of how logits are
computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import MOST_CANDIDATES, Word
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
    i32,
    load,
    local,
    reinterpret,
    select,
    state_word,
    store,
)
from dflashc.targets.gpu.kernels.double_precision import exp_double
from dflashc.targets.gpu.kernels.random_numbers import uniform
from dflashc.targets.gpu.traits import Traits

_F64 = "float64"


def number_of(sampling: Expr, word: Word) -> Expr:
    """A float64 word of the "sampling" buffer, which is declared uint64."""
    return bind(reinterpret(_F64, load(sampling, int(word))))


def count_of(sampling: Expr, word: Word) -> Expr:
    """A word of the "sampling" buffer that counts, int32."""
    return bind(cast("int32", load(sampling, int(word))))


def position_of(state: Expr, row: Expr) -> Expr:
    """Position of the token that a head's row `row` decides: behind the n committed ones and the run's rows up to it.

    Word 0 of the state block is n, word 1 the row of the run that is the head's first.
    """
    return bind(state_word(state, 0) + state_word(state, 1) + row + 1)


def draw(traits: Traits) -> Kernel:
    """Draw the token of each row among its best logits: top-k, top-p, min-p, temperature, draw. Workgroup = a row.

    Arguments
    ---------
    best, token : float32, int32 (M, 64), of `candidates`
    state : the state block; see `position_of`
    sampling : uint64; see `runtime.device_sampling.Word`
    ids : int32 (M,), written; -1 where the largest logit is no finite number
    """
    k = KernelBuilder("draw", traits)
    with k.build([("best", "float32"), ("token", "int32"), ("state", "int32"), ("sampling", "uint64"),
                  ("ids", "int32")]) as arguments:
        best, token, state, sampling, ids = arguments
        with k.workgroups(MOST_CANDIDATES) as (row, thread):
            first = bind(row * MOST_CANDIDATES)
            law = _Law.declare(k, thread, best, first, count_of(sampling, Word.CANDIDATES))
            law.filter_top_p(number_of(sampling, Word.TOP_P))
            law.filter_min_p(number_of(sampling, Word.LOG_MIN_P))
            law.weigh(number_of(sampling, Word.TEMPERATURE))
            with T.If(thread == 0), T.Then():
                number = uniform(bind(load(sampling, int(Word.SEED))), Purpose.SAMPLE, position_of(state, row))
                drawn = load(token, first + law.share_of(number))
                largest = bind(load(best, first))
                finite = tirx.all(largest > f32(float("-inf")), largest < f32(float("inf")))
                store(ids, row, select(finite, bind(drawn), i32(-1)))
    return k.kernel


@dataclass(frozen=True)
class _Law:
    """The candidates that are left of a row, the likeliest first, and their probabilities; a thread for each candidate.

    All methods but `share_of` are called by all threads.
    """

    thread: Expr
    logits: Expr
    probability: Expr
    left: Expr
    total: Expr

    @classmethod
    def declare(cls, k: KernelBuilder, thread: Expr, best: Expr, first: Expr, candidates: Expr) -> _Law:
        """The law of the `candidates` best of the logits from best[first] on."""
        logits, probability = k.shared(MOST_CANDIDATES, _F64), k.shared(MOST_CANDIDATES, _F64)
        left, total = k.shared(1, "int32"), k.shared(1, _F64)
        store(logits, thread, cast(_F64, load(best, first + thread)))
        with T.If(thread == 0), T.Then():
            store(left, 0, candidates)
        barrier()
        return cls(thread, logits, probability, left, total)

    def weigh(self, temperature: Expr) -> None:
        """Probabilities: the softmax of the logits over `temperature`."""
        is_left = bind(self.thread < load(self.left, 0))
        with T.If(is_left), T.Then():
            weight = exp_double(bind((load(self.logits, self.thread) - load(self.logits, 0)) / temperature))
            store(self.probability, self.thread, weight)
        barrier()
        with T.If(self.thread == 0), T.Then():
            store(self.total, 0, self._sum())
        barrier()
        with T.If(is_left), T.Then():
            store(self.probability, self.thread, load(self.probability, self.thread) / load(self.total, 0))
        barrier()

    def _sum(self) -> Expr:
        total = local(1, _F64)
        store(total, 0, const(0, _F64))
        with T.serial(i32(0), bind(load(self.left, 0))) as place:
            store(total, 0, load(total, 0) + load(self.probability, place))
        return bind(load(total, 0))

    def filter_top_p(self, share: Expr) -> None:
        """Keep the likeliest until their probabilities reach `share`, one at least."""
        self.weigh(const(1, _F64))
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

    def filter_min_p(self, log_share: Expr) -> None:
        """Keep those at least exp(log_share) as likely as the likeliest."""
        with T.If(self.thread == 0), T.Then():
            bound, kept = bind(load(self.logits, 0) + log_share), local(1, "int32")
            store(kept, 0, i32(0))
            with T.serial(i32(0), bind(load(self.left, 0))) as place, \
                    T.If(load(self.logits, place) >= bound), T.Then():
                store(kept, 0, place + 1)
            store(self.left, 0, load(kept, 0))
        barrier()

    def share_of(self, number: Expr) -> Expr:
        """The place whose share of [0, 1) holds `number`; empty shares at the end hold none."""
        whole = self._sum()
        bound = bind(number * whole)
        reached, found = local(1, _F64), local(1, "int32")
        store(reached, 0, const(0, _F64))
        store(found, 0, i32(-1))
        with T.serial(i32(0), bind(load(self.left, 0))) as place:
            store(reached, 0, load(reached, 0) + load(self.probability, place))
            ends = tirx.any(load(reached, 0) > bound, load(reached, 0) >= whole)
            with T.If(tirx.all(load(found, 0) < 0, ends)), T.Then():
                store(found, 0, place)
        return bind(tirx.max(load(found, 0), i32(0)))
