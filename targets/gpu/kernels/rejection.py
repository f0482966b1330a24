"""Rejection sampling: proposals drawn from the drafter's law q become tokens that follow the target's law p, exactly.

As in `targets.cpu.kernels.rejection`, token by token; that says why it is right.
"""

from __future__ import annotations

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
    const,
    i32,
    load,
    local,
    select,
    store,
)
from dflashc.targets.gpu.kernels.law import RequestLaw, pick, sum_of
from dflashc.targets.gpu.kernels.sampling_state import number_of, position_of, random_number
from dflashc.targets.gpu.traits import Traits

_F64 = "float64"


def judge(traits: Traits, count: int) -> Kernel:
    """`sampler.draw` for a round whose proposals were drawn: each row keeps the proposal behind it, or replaces it.

    The last row, which none is behind, draws like `sampler.draw`; so do all where the request's proposals are not drawn
    (`Word.DRAFT_TEMPERATURE` is 0). Workgroup = a row.

    Parameters
    ----------
    count : int
        Candidates of the drafter.

    Notes
    -----
    Arguments: best, token, state, sampling as for `sampler.draw`; tokens int32 (M,), the run's rows, of which row i + 1
    was proposed behind row i; candidates int32 and probabilities float64 (M - 1, count), the laws that these were drawn
    from; ids int32 (M,), written as by `sampler.draw`; then the scalar rows (M).
    """
    k = KernelBuilder(f"judge_{count}", traits)
    with k.build([("best", "float32"), ("token", "int32"), ("state", "int32"), ("sampling", "uint64"),
                  ("tokens", "int32"), ("candidates", "int32"), ("probabilities", _F64), ("ids", "int32"),
                  ("rows", "i32")]) as arguments:
        best, token, state, sampling, tokens, candidates, probabilities, ids, rows = arguments
        with k.workgroups(MOST_CANDIDATES) as (row, thread):
            law, rest = RequestLaw.declare(k, thread, row, best, token), k.shared(MOST_CANDIDATES, _F64)
            zero = const(0, _F64)

            def proposed_share(of: Expr) -> Expr:
                """q(of); a row without a proposal has none."""
                total = local(1, _F64)
                store(total, 0, zero)
                with T.serial(i32(0), select(row + 1 < rows, i32(count), i32(0))) as place:
                    entry = bind(row * count + place)
                    share = select(load(candidates, entry) == of, load(probabilities, entry), zero)
                    store(total, 0, load(total, 0) + share)
                return bind(load(total, 0))

            law.filter(sampling)
            with T.If(law.is_left()), T.Then():
                left = bind(load(law.probability, thread) - proposed_share(law.token_at(thread)))
                store(rest, thread, select(left > zero, left, zero))
            barrier()
            with T.If(thread == 0), T.Then():
                position, result = position_of(state, row), local(1, "int32")
                drawn = number_of(sampling, Word.DRAFT_TEMPERATURE) > zero
                with T.If(tirx.all(drawn, row + 1 < rows)):
                    with T.Then():
                        proposal = bind(load(tokens, row + 1))
                        bound = bind(random_number(sampling, Purpose.ACCEPT, position) * proposed_share(proposal))
                        with T.If(bound < _share_of(law, proposal)):
                            with T.Then():
                                store(result, 0, proposal)
                            with T.Else():
                                number = random_number(sampling, Purpose.RESAMPLE, position)
                                left = bind(load(law.left, 0))
                                with T.If(sum_of(rest, left) > zero):
                                    with T.Then():
                                        store(result, 0, law.token_at(pick(rest, left, number)))
                                    with T.Else():
                                        store(result, 0, law.draw(number))
                    with T.Else():
                        store(result, 0, law.draw(random_number(sampling, Purpose.SAMPLE, position)))
                store(ids, row, law.unless_broken(load(result, 0)))
    return k.kernel


def _share_of(law: RequestLaw, token: Expr) -> Expr:
    """p(token)."""
    found = local(1, _F64)
    store(found, 0, const(0, _F64))
    with T.serial(i32(0), bind(load(law.left, 0))) as place, T.If(law.token_at(place) == token), T.Then():
        store(found, 0, load(law.probability, place))
    return bind(load(found, 0))
