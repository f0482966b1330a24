"""DFlash2's candidate selector: the best tokens of each row, and the walk that makes each token fit the last.

Larger logits come first and, among equals, lower ids; NaN never wins. Knows nothing of how logits are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import Word
from dflashc.runtime.sampling import Purpose
from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, cast, const, i64, load, local, store
from dflashc.targets.cpu.kernels.embedding import emit_row
from dflashc.targets.cpu.kernels.law import Law
from dflashc.targets.cpu.kernels.sampling_state import decided_position, parameter, random_number
from dflashc.targets.cpu.kernels.vector_math import exp, select
from dflashc.targets.cpu.traits import Traits, broadcast, intrinsic
from dflashc.targets.packing import PACKED_FORMATS

SEGMENT = 16384
"""Logits of a unit of `top_candidates`."""

_CHUNK = 32  # logits that are compared with the worst candidate at once
_LOWEST = float("-inf")


@dataclass(frozen=True)
class Ranking:
    """The best candidates so far, best first, in local buffers behind a sentinel that nothing beats.

    Places without a candidate hold (-inf, 0). Equal values must come with ascending ids.
    """

    count: int
    values: Expr
    tokens: Expr

    @classmethod
    def declare(cls, count: int) -> Ranking:
        return cls(count, local(count + 1, "float32"), local(count + 1, "int32"))

    def reset(self) -> None:
        with T.serial(i64(1), i64(self.count + 1)) as place:
            store(self.values, place, const(_LOWEST, "float32"))
            store(self.tokens, place, const(0, "int32"))
        store(self.values, 0, const(float("inf"), "float32"))
        store(self.tokens, 0, const(0, "int32"))

    def worst(self) -> Expr:
        return load(self.values, self.count)

    def candidate(self, place: Expr) -> tuple[Expr, Expr]:
        """Value and token of number `place`, from 0."""
        return load(self.values, place + 1), load(self.tokens, place + 1)

    def offer(self, value: Expr, token: Expr) -> None:
        """Put a candidate into its place, if it has one; those below it move down."""
        with T.If(value > self.worst()), T.Then(), T.serial(i64(0), i64(self.count)) as step:
            place = bind(i64(self.count) - step)
            above, here = bind(load(self.values, place - 1)), bind(load(self.values, place))
            moves, enters = bind(value > above), bind(value > here)
            store(self.values, place, select(moves, above, select(enters, value, here)))
            kept = select(enters, token, load(self.tokens, place))
            store(self.tokens, place, select(moves, load(self.tokens, place - 1), kept))

    def gather(self, value: Expr, index: Expr, row: Expr, segments: Expr) -> None:
        """Take a row's best from those of its segments, as `top_candidates` leaves them."""
        self.reset()
        size = bind(segments * self.count)
        with T.serial(row * size, (row + 1) * size) as entry:
            self.offer(bind(load(value, entry)), bind(load(index, entry)))


def top_candidates(traits: Traits, count: int, ids_of: str = "columns") -> Kernel:
    """The `count` best logits of each segment of 16384. Unit = one segment of a row: M * ceil(V / 16384) units.

    Parameters
    ----------
    ids_of : str
        "columns" for the logits' indices, "d2t" to look them up.

    Notes
    -----
    Arguments: logits float32 (M, V) [, d2t int32 (V,)], value float32 (M, segments, count), index int32 (M, segments,
    count), both best first, -inf and the id of column 0 where a segment has fewer; then the scalar columns (V).
    """
    k = KernelBuilder(f"top_candidates_{count}_{ids_of}", traits)
    with k.build():
        logits = k.buffer("logits", "float32")
        d2t = k.buffer("d2t", "int32") if ids_of == "d2t" else None
        value, index = k.buffer("value", "float32"), k.buffer("index", "int32")
        columns = k.scalar("columns")
        segments = bind(tirx.floordiv(columns + i64(SEGMENT - 1), i64(SEGMENT)))
        ranking, found = Ranking.declare(count), local(1, "int32")
        with k.units() as unit:
            row = bind(tirx.floordiv(unit, segments))
            first = bind((unit - row * segments) * i64(SEGMENT))
            end = bind(tirx.min(first + i64(SEGMENT), columns))
            ranking.reset()
            with T.serial(i64(0), tirx.floordiv(end - first + i64(_CHUNK - 1), i64(_CHUNK))) as chunk:
                token = bind(first + chunk * i64(_CHUNK))
                start = bind(row * columns + token)
                store(found, 0, const(1, "int32"))
                with T.If(token + i64(_CHUNK) <= end), T.Then():
                    store(found, 0, _any_above(traits, logits, start, ranking.worst()))
                with T.If(load(found, 0) != const(0, "int32")), T.Then(), \
                        T.serial(i64(0), tirx.min(end - token, i64(_CHUNK))) as i:
                    ranking.offer(bind(load(logits, start + i)), bind(cast("int32", token + i)))
            with T.serial(i64(0), i64(count)) as place:
                best, best_token = ranking.candidate(place)
                store(value, unit * count + place, best)
                store(index, unit * count + place,
                      best_token if d2t is None else load(d2t, cast("int64", best_token)))
    return k.kernel


def _any_above(traits: Traits, logits: Expr, start: Expr, limit: Expr) -> Expr:
    """Whether any of a chunk's logits is larger than `limit`: int32, 0 if not."""
    lanes = traits.lanes
    limits, result = bind(broadcast(limit, lanes)), const(0, traits.i32)
    for offset in range(0, _CHUNK, lanes):
        above = load(logits, start + i64(offset), lanes) > limits
        result = bind(result | select(above, const(1, traits.i32), const(0, traits.i32)))
    return intrinsic("int32", "llvm.vector.reduce.or", result)


def select_candidates(traits: Traits, count: int, format_predecessor: str, format_successor: str) -> Kernel:
    """Left to right, each row's candidate by its score given the token before it. Unit = all; 1 unit.

    score(c) = logit(c) + sum_r predecessor[previous, r] * projected[row, r] * successor[c, r] over the `count` best
    logits c of the row; the previous token of row 0 is block[0]. Where the request's proposals are drawn, from
    softmax(score / temperature), else the best score wins, among equals the earlier candidate. A row without any number
    among its scores proposes its first candidate.

    Arguments
    ---------
    value, index : float32, int32 (M, segments, count), of `top_candidates`
    projected : float32 (M, rank)
    block : int32
    predecessor, successor : uint8; packed tables (V, rank)
    state, sampling : int64; see `sampling_state`; row i decides the token at its position
    scratch : float32 (2, rank)
    ids : int32 (M,), written
    confidence : float32 (M,), written: the best score's share of softmax(score); 0 if no score is a number
    candidates, probabilities : int32, float64 (M, count), written: the law that the row's token is drawn from
    rows (M), segments, rank : i64
    """
    tables = [PACKED_FORMATS[name] for name in (format_predecessor, format_successor)]
    k = KernelBuilder(f"select_candidates_{count}_{format_predecessor}_{format_successor}", traits)
    with k.build():
        value, index = k.buffer("value", "float32"), k.buffer("index", "int32")
        projected, block = k.buffer("projected", "float32"), k.buffer("block", "int32")
        predecessor, successor = k.buffer("predecessor", "uint8"), k.buffer("successor", "uint8")
        state, sampling = k.buffer("state", "int64"), k.buffer("sampling", "int64")
        scratch = k.buffer("scratch", "float32")
        ids, confidence = k.buffer("ids", "int32"), k.buffer("confidence", "float32")
        candidates, probabilities = k.buffer("candidates", "int32"), k.buffer("probabilities", "float64")
        rows, segments, rank = k.scalar("rows"), k.scalar("segments"), k.scalar("rank")
        ranking, scores, previous = Ranking.declare(count), local(count, "float32"), local(1, "int32")
        law = Law.declare(count)
        law.keep(i64(count))
        one = const(1, "float32")
        with k.units():
            store(previous, 0, load(block, 0))
            with T.serial(i64(0), rows) as row:
                ranking.gather(value, index, row, segments)
                before = bind(cast("int64", load(previous, 0)))
                emit_row(traits, tables[0], predecessor, before, rank, scratch, i64(0), one)
                _multiply(traits, scratch, projected, row * rank, rank)
                with T.serial(i64(0), i64(count)) as place:
                    logit, token = ranking.candidate(place)
                    emit_row(traits, tables[1], successor, bind(cast("int64", token)), rank, scratch, rank, one)
                    store(scores, place, logit + _product(traits, scratch, rank))
                best, share = _best(traits, scores, count)
                chosen = _choose(law, scores, best, sampling, decided_position(state, row))
                store(previous, 0, ranking.candidate(chosen)[1])
                store(ids, row, load(previous, 0))
                store(confidence, row, share)
                with T.serial(i64(0), i64(count)) as place:
                    store(candidates, row * count + place, ranking.candidate(place)[1])
                    store(probabilities, row * count + place, law.share(place))
    return k.kernel


def best_candidate(traits: Traits, count: int) -> Kernel:
    """The best logit of each row and its share of the softmax over the `count` best. Unit = one row.

    Arguments
    ---------
    value, index : float32, int32 (M, segments, count), of `top_candidates`
    ids : int32 (M,), written
    confidence : float32 (M,), written; 0 if no logit is a number
    segments : i64
    """
    k = KernelBuilder(f"best_candidate_{count}", traits)
    with k.build():
        value, index = k.buffer("value", "float32"), k.buffer("index", "int32")
        ids, confidence = k.buffer("ids", "int32"), k.buffer("confidence", "float32")
        segments = k.scalar("segments")
        ranking, logits = Ranking.declare(count), local(count, "float32")
        with k.units() as row:
            ranking.gather(value, index, row, segments)
            with T.serial(i64(0), i64(count)) as place:
                store(logits, place, ranking.candidate(place)[0])
            best, share = _best(traits, logits, count)
            store(ids, row, ranking.candidate(best)[1])
            store(confidence, row, share)
    return k.kernel


def _choose(law: Law, scores: Expr, best: Expr, sampling: Expr, position: Expr) -> Expr:
    """The place of the proposal for `position`; `law` becomes what it was drawn from, all on one place if on none."""
    chosen, temperature = local(1, "int64"), parameter(sampling, Word.DRAFT_TEMPERATURE)
    store(chosen, 0, best)
    law.concentrate(best)
    with T.If(temperature > const(0, "float64")), T.Then():

        def score(place: Expr) -> Expr:
            return bind(cast("float64", load(scores, place)))

        total = law.weigh(score, score(best), temperature)
        with T.If(total >= const(1, "float64")):
            with T.Then():
                store(chosen, 0, law.draw(random_number(sampling, Purpose.DRAFT, position)))
            with T.Else():  # a score is no number
                law.concentrate(best)
    return bind(load(chosen, 0))


def _multiply(traits: Traits, scratch: Expr, factor: Expr, start: Expr, rank: Expr) -> None:
    """scratch[0] *= factor[start:][:rank]."""
    lanes = traits.lanes
    with T.serial(i64(0), tirx.floordiv(rank, i64(lanes))) as step:
        at = bind(step * lanes)
        store(scratch, at, load(scratch, at, lanes) * load(factor, start + at, lanes), lanes)


def _product(traits: Traits, scratch: Expr, rank: Expr) -> Expr:
    """scratch[0] . scratch[1]."""
    lanes = traits.lanes
    sums = local(lanes, "float32")
    store(sums, 0, const(0, traits.f32), lanes)
    with T.serial(i64(0), tirx.floordiv(rank, i64(lanes))) as step:
        at = bind(step * lanes)
        a, b = load(scratch, at, lanes), load(scratch, rank + at, lanes)
        store(sums, 0, traits.fma(a, b, load(sums, 0, lanes)), lanes)
    return bind(intrinsic("float32", "llvm.vector.reduce.fadd", const(0, "float32"), load(sums, 0, lanes)))


def _best(traits: Traits, scores: Expr, count: int) -> tuple[Expr, Expr]:
    """The first of the largest scores, int64, and its share of the softmax."""
    best, where, total = local(1, "float32"), local(1, "int64"), local(1, "float32")
    zero = const(0, "float32")
    store(best, 0, const(_LOWEST, "float32"))
    store(where, 0, i64(0))
    with T.serial(i64(0), i64(count)) as place, T.If(load(scores, place) > load(best, 0)), T.Then():
        store(best, 0, load(scores, place))
        store(where, 0, place)
    store(total, 0, zero)
    with T.serial(i64(0), i64(count)) as place:
        store(total, 0, load(total, 0) + exp(traits, bind(load(scores, place) - load(best, 0))))
    sum_of_all = bind(load(total, 0))
    return bind(load(where, 0)), bind(select(sum_of_all > zero, const(1, "float32") / sum_of_all, zero))
