"""Rejection sampling: proposals drawn from the drafter's law q become tokens that follow the target's law p, exactly.

A proposal d is kept with probability min(1, p(d) / q(d)); in its place comes a token drawn from max(p - q, 0), or from
p where nothing of that is left (Leviathan, Kalman and Matias, 2023; Chen et al., 2023). The random numbers that
proposed, that keep and that replace are of three streams, so none tells anything of another.

A position may be drafted again when a proposal before it was refused: with the same number, which is as good as new,
for what was proposed behind a refusal has decided nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import MOST_CANDIDATES, Word
from dflashc.runtime.sampling import Purpose
from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, const, load, local, store
from dflashc.targets.cpu.kernels.sampler import RequestLaw
from dflashc.targets.cpu.kernels.sampling_state import decided_position, parameter, random_number
from dflashc.targets.cpu.kernels.vector_math import select
from dflashc.targets.cpu.traits import Traits

_F64 = "float64"


def judge(traits: Traits, count: int) -> Kernel:
    """`sampler.draw` for a round whose proposals were drawn: each row keeps the proposal behind it, or replaces it.

    The last row, which none is behind, draws like `sampler.draw`; so do all where the request's proposals are not drawn
    (`Word.DRAFT_TEMPERATURE` is 0). A row that gives the proposal has kept it, so `accept` need know nothing of this.
    Unit = one row.

    Parameters
    ----------
    count : int
        Candidates of the drafter.

    Notes
    -----
    Arguments: value, index, state, sampling as for `sampler.draw`; tokens int32 (M,), the run's rows, of which row
    i + 1 was proposed behind row i; candidates int32 and probabilities float64 (M - 1, count), the laws that these were
    drawn from; ids int32 (M,), written as by `sampler.draw`; then the scalars segments, rows (M).
    """
    k = KernelBuilder(f"judge_{count}", traits)
    with k.build():
        value, index = k.buffer("value", "float32"), k.buffer("index", "int32")
        state, sampling = k.buffer("state", "int64"), k.buffer("sampling", "int64")
        tokens = k.buffer("tokens", "int32")
        proposed = _ProposedLaws(count, k.buffer("candidates", "int32"), k.buffer("probabilities", _F64))
        ids, segments, rows = k.buffer("ids", "int32"), k.scalar("segments"), k.scalar("rows")
        target, token = RequestLaw.declare(), local(1, "int32")
        with k.units() as row:
            target.ranking.gather(value, index, row, segments)
            target.filter(sampling)
            position = decided_position(state, row)
            drawn = parameter(sampling, Word.DRAFT_TEMPERATURE) > const(0, _F64)
            with T.If(tirx.all(drawn, row + 1 < rows)):
                with T.Then():
                    proposal = bind(load(tokens, row + 1))
                    bound = random_number(sampling, Purpose.ACCEPT, position) * proposed.share(row, proposal)
                    with T.If(bound < _share_of(target, proposal)):
                        with T.Then():
                            store(token, 0, proposal)
                        with T.Else():
                            _take_off(target, proposed, row)
                            store(token, 0, target.draw(random_number(sampling, Purpose.RESAMPLE, position)))
                with T.Else():
                    store(token, 0, target.draw(random_number(sampling, Purpose.SAMPLE, position)))
            store(ids, row, target.unless_broken(load(token, 0)))
    return k.kernel


@dataclass(frozen=True)
class _ProposedLaws:
    """What the drafter drew from, per row over `count` candidates; nothing else has a share."""

    count: int
    candidates: Expr
    probabilities: Expr

    def share(self, row: Expr, token: Expr) -> Expr:
        """q(token) of a row."""
        total = local(1, _F64)
        store(total, 0, const(0, _F64))
        with T.serial(row * self.count, (row + 1) * self.count) as entry:
            share = select(load(self.candidates, entry) == token, load(self.probabilities, entry), const(0, _F64))
            store(total, 0, load(total, 0) + share)
        return bind(load(total, 0))


def _share_of(target: RequestLaw, token: Expr) -> Expr:
    """p(token)."""
    found = local(1, _F64)
    store(found, 0, const(0, _F64))
    with target.law.places() as place, T.If(target.token(place) == token), T.Then():
        store(found, 0, target.law.share(place))
    return bind(load(found, 0))


def _take_off(target: RequestLaw, proposed: _ProposedLaws, row: Expr) -> None:
    """Turn p into max(p - q, 0), unless that is nothing."""
    law, zero = target.law, const(0, _F64)
    rest, total = local(MOST_CANDIDATES, _F64), local(1, _F64)
    store(total, 0, zero)
    with law.places() as place:
        left = bind(law.share(place) - proposed.share(row, bind(target.token(place))))
        store(rest, place, select(left > zero, left, zero))
        store(total, 0, load(total, 0) + load(rest, place))
    with T.If(load(total, 0) > zero), T.Then(), law.places() as place:
        store(law.probability, place, load(rest, place))
