"""The reference of rejection sampling keeps the law, and the chi-square test on it sees what would not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.reference.rejection import Numbers, judge, pick

COUNT = 100_000
QUANTILE_7 = 24.32
"""0.999 quantile of chi-square with 7 degrees of freedom. All is seeded: there is no chance in these tests."""
P = np.array([0.28, 0.03, 0.2, 0.07, 0.13, 0.15, 0.05, 0.09])
Q = np.array([0.05, 0.3, 0.05, 0.2, 0.1, 0.1, 0.15, 0.05])


def chi_square(tokens: np.ndarray, law: np.ndarray) -> float:
    expected = law * len(tokens)
    return float(((np.bincount(tokens, minlength=len(law)) - expected) ** 2 / expected).sum())


def each(law: np.ndarray) -> np.ndarray:
    return np.broadcast_to(law, (COUNT, len(law)))


def emitted(numbers: Numbers, q: np.ndarray = Q) -> np.ndarray:
    return judge(each(P), each(q), pick(each(q), numbers.draft), numbers)


@pytest.mark.parametrize("q", [Q, P, np.eye(8)[1], np.array([0, 0.5, 0, 0.5, 0, 0, 0, 0])],
                         ids=["another", "the same", "one-hot", "truncated"])
def test_tokens_follow_the_law_of_the_target(q: np.ndarray) -> None:
    assert chi_square(emitted(Numbers.independent(COUNT, 0), q), P) < QUANTILE_7


@pytest.mark.parametrize(("one", "other"), [("draft", "accept"), ("draft", "resample"), ("accept", "resample")])
def test_numbers_that_decide_two_things_are_seen(one: str, other: str) -> None:
    """So were they in VLLM before its pull request 54282, where drafts and their replacements shared noise."""
    numbers = Numbers.independent(COUNT, 0)
    shared = replace(numbers, **{other: getattr(numbers, one)})
    assert chi_square(emitted(shared), P) > 10 * QUANTILE_7


@pytest.mark.parametrize("lossless", [True, False], ids=["the likeliest", "the proposed"])
def test_a_cut_may_look_at_the_likeliest_token_alone(lossless: bool) -> None:
    """Tokens that are proposed below p-min would come less often if that decided what is verified. Here p = q, and what
    is proposed is kept; half of the positions have a law that is sharp, half one that is flat."""
    numbers = Numbers.independent(COUNT, 0)
    flat = np.arange(COUNT) % 2 == 0
    laws = np.where(flat[:, None], np.full(8, 1 / 8), np.array([0.9, *[0.1 / 7] * 7]))
    proposals = pick(laws, numbers.draft)
    probability = laws.max(axis=-1) if lossless else laws[np.arange(COUNT), proposals]
    tokens = np.where(probability < 0.5, pick(laws, numbers.sample), proposals)
    assert (chi_square(tokens, laws.mean(axis=0)) < QUANTILE_7) == lossless
