"""Rejection sampling in a kernel: token by token as the papers have it, and in bulk as the target's law has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest

from dflashc.runtime.device_sampling import MOST_CANDIDATES, sampling_words
from dflashc.runtime.sampling import Purpose, SamplingParameters, probabilities, sample, uniform
from dflashc.targets.cpu.kernels.rejection import judge
from dflashc.targets.cpu.kernels.selector import top_candidates
from dflashc.targets.requests import KernelRequest
from tests.reference import rejection
from tests.reference.rejection import Numbers, pick
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

Judged = Callable[..., np.ndarray]
SEED, COUNT, CANDIDATES = 2**63 + 7, 100_000, 8
ALL = SamplingParameters(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=SEED)
SAMPLERS = {
    "all": ALL,
    "default": SamplingParameters(seed=SEED),
    "top-k": SamplingParameters(temperature=0.6, top_k=3, top_p=1.0, min_p=0.0, seed=SEED),
    "top-p": SamplingParameters(temperature=1.3, top_k=0, top_p=0.6, min_p=0.0, seed=SEED),
    "one": SamplingParameters(temperature=1.0, top_k=1, seed=SEED),
}
P = np.array([0.28, 0.03, 0.2, 0.07, 0.13, 0.15, 0.05, 0.09])
Q = {
    "another": np.array([0.05, 0.3, 0.05, 0.2, 0.1, 0.1, 0.15, 0.05]),
    "the same": P,
    "truncated": np.array([0.5, 0, 0.3, 0, 0, 0.2, 0, 0]),
    "one-hot": np.eye(8)[1],
}
QUANTILES = {1: 10.83, 3: 16.27, 7: 24.32, 63: 103.4}
"""0.999 quantiles of chi-square by degrees of freedom. All is seeded: there is no chance in these tests."""


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest("judge", judge, (CANDIDATES,)), KernelRequest("top", top_candidates, (MOST_CANDIDATES,))]
    return Library(request.param, requests, tmp_path_factory.mktemp("rejection"))


@pytest.fixture(scope="module")
def judged(library: Library) -> Judged:
    """Tokens of all rows of logits (M, V), of which all but the last have a proposal, drawn from q (M - 1, V)."""

    def run(logits: np.ndarray, proposals: np.ndarray, q: np.ndarray, parameters: SamplingParameters,
            committed: int = 0, draft_temperature: float = 1.0) -> np.ndarray:
        rows, columns = logits.shape
        value = np.empty((rows, 1, MOST_CANDIDATES), np.float32)
        index, ids = np.empty(value.shape, np.int32), np.full(rows, -7, np.int32)
        library.run("top", [logits, value, index, columns], rows)
        words, tokens = sampling_words(parameters, columns, draft_temperature), np.array([-1, *proposals], np.int32)
        library.run("judge", [value, index, np.array([committed, 0]), words, tokens, *laws_of(q), ids, 1, rows], rows)
        return ids

    return run


def laws_of(q: np.ndarray) -> list[np.ndarray]:
    """Candidates and their probabilities, (M, CANDIDATES); q has no more than that."""
    order = np.argsort(-q, axis=1, kind="stable")[:, :CANDIDATES]
    return [order.astype(np.int32), np.take_along_axis(q, order, axis=1)]


@cache
def numbers(first: int, count: int) -> Numbers:
    """Those of positions `first`.. ."""
    return Numbers(*(np.array([uniform(SEED, position, purpose) for position in range(first, first + count)])
                     for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESAMPLE, Purpose.SAMPLE)))


def expected(logits: np.ndarray, proposal: int, q: np.ndarray, position: int, parameters: SamplingParameters) -> int:
    """The token that comes of a proposal, by the reference, which takes tokens in the order of their probability."""
    ids, p = probabilities(logits, [], parameters)
    place = np.flatnonzero(ids == proposal)
    everything = np.concatenate([p, [0.0]])  # the last place is for all that the sampler does not allow
    there = np.array([place[0] if place.size else len(p)])
    mine = np.array([*q[ids], q[proposal]])
    return int([*ids, proposal][rejection.judge(everything[None], mine[None], there, numbers(position, 1))[0]])


def proposed_laws(rows: int, columns: int) -> np.ndarray:
    """Laws over some tokens each: broad, sharp and one-hot ones."""
    rng = np.random.default_rng(2)
    q = np.zeros((rows, columns))
    for row in range(rows):
        count = [CANDIDATES, 3, 1][row % 3]
        q[row, rng.choice(columns, count, replace=False)] = rng.dirichlet(np.ones(count))
    return q


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_tokens_of_the_reference(judged: Judged, sampler: str) -> None:
    check_tokens_of_the_reference(judged, SAMPLERS[sampler])


def check_tokens_of_the_reference(judged: Judged, parameters: SamplingParameters) -> None:
    """Whatever p and q are, and where they do not meet; the last row draws from p, and so do all without rejection."""
    rows, columns = 300, 12
    logits = (2 * np.random.default_rng(1).standard_normal((rows, columns))).astype(np.float32)
    q = proposed_laws(rows - 1, columns)
    proposals = pick(q, numbers(101, rows - 1).draft)
    tokens = judged(logits, proposals, q, parameters, 100)
    wanted = [expected(*each, position, parameters)
              for position, each in enumerate(zip(logits, proposals, q, strict=False), 101)]
    assert tokens.tolist() == [*wanted, sample(logits[-1], [], 100 + rows, parameters)]
    kept = (tokens[:-1] == proposals).sum()
    assert 0 < kept < rows - 1
    matched = judged(logits, proposals, q, parameters, 100, 0.0)
    assert matched.tolist() == [sample(row, [], position, parameters) for position, row in enumerate(logits, 101)]


def test_rows_are_independent(judged: Judged) -> None:
    """All but the last, which has no proposal."""
    logits, q = np.random.default_rng(1).standard_normal((16, 12)).astype(np.float32), proposed_laws(15, 12)
    proposals = pick(q, numbers(1, 15).draft)
    whole = judged(logits, proposals, q, ALL)
    for rows in range(1, 16):
        some = judged(logits[: rows + 1], proposals[:rows], q[:rows], ALL)
        assert some[:-1].tolist() == whole[:rows].tolist()


def test_broken_logits_are_marked(judged: Judged) -> None:
    check_broken_logits(judged)


def check_broken_logits(judged: Judged) -> None:
    """In their own row alone."""
    logits, q = np.zeros((4, 12), np.float32), proposed_laws(3, 12)
    logits[0], logits[2, 5], logits[3] = np.nan, np.inf, -np.inf
    tokens = judged(logits, pick(q, numbers(1, 3).draft), q, ALL)
    assert (tokens[[0, 2, 3]] == -1).all()
    assert tokens[1] >= 0


def check_law(tokens: np.ndarray, law: np.ndarray) -> None:
    """Chi-square, and nothing that cannot be."""
    counts, possible = np.bincount(tokens, minlength=law.size), law.ravel() > 0
    assert counts[~possible].sum() == 0
    wanted = law.ravel()[possible] * len(tokens)
    assert ((counts[possible] - wanted) ** 2 / wanted).sum() < QUANTILES[possible.sum() - 1]


def bulk(law: np.ndarray, count: int = COUNT + 1) -> np.ndarray:
    return np.tile(law, (count, 1))


LAWS: Mapping[str, tuple[np.ndarray, SamplingParameters]] = {  # proposals' law q, and the sampler that makes p of P
    **{name: (q, ALL) for name, q in Q.items()},
    "p truncated": (Q["another"], SamplingParameters(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0, seed=SEED)),
    "both truncated": (Q["truncated"], SamplingParameters(temperature=0.7, top_k=0, top_p=0.7, min_p=0.0, seed=SEED)),
    "disjoint": (np.array([0, 0.5, 0, 0.2, 0, 0, 0.3, 0]),
                 SamplingParameters(temperature=1.4, top_k=4, top_p=1.0, min_p=0.0, seed=SEED)),
}


@pytest.mark.parametrize("name", LAWS)
def test_single_tokens_follow_the_law(judged: Judged, name: str) -> None:
    """Over 100 000 positions with one seed."""
    q, parameters = LAWS[name]
    logits = np.log(P).astype(np.float32)
    proposals = pick(bulk(q, COUNT), numbers(1, COUNT).draft)
    tokens = judged(bulk(logits), proposals, bulk(q, COUNT), parameters)[:-1]
    ids, shares = probabilities(logits, [], parameters)
    law = np.zeros(8)
    law[ids] = shares
    check_law(tokens, law)
    if name == "disjoint":
        assert not (tokens == proposals).any()
    if name == "the same":
        assert (tokens == proposals).mean() > 0.9999


def test_pairs_of_tokens_follow_the_law(judged: Judged) -> None:
    """Both laws depend on the token before. Where the first proposal is refused, the second position is drafted again
    behind what came instead, with the same random numbers: they have decided nothing so far.

    Sequence s is rows 3 s (first token), 3 s + 1 (second token) and 3 s + 2, which is left.
    """
    rng = np.random.default_rng(4)
    behind_p, behind_q = rng.dirichlet(np.ones(8) * 2, 8), rng.dirichlet(np.ones(8), 8)
    count = COUNT // 3
    numbers_of = numbers(1, COUNT)
    first, second = slice(0, 3 * count, 3), slice(1, 3 * count, 3)
    p, q, proposals = bulk(P, 3 * count + 1), bulk(Q["another"], 3 * count), np.zeros(3 * count, np.int64)

    def run(before: np.ndarray) -> np.ndarray:
        """Tokens of all rows, those of second tokens behind `before`."""
        p[second], q[second] = behind_p[before], behind_q[before]
        proposals[second] = pick(q[second], numbers_of.draft[second])
        return judged(np.log(p).astype(np.float32), proposals, q, ALL)

    proposals[first] = pick(q[first], numbers_of.draft[first])
    tokens = run(proposals[first])
    ones, others = tokens[first], tokens[second]
    kept = ones == proposals[first]
    assert 0.3 < kept.mean() < 0.7
    others = np.where(kept, others, run(ones)[second])
    check_law(ones * 8 + others, P[:, None] * behind_p)
