"""The law of the next token against its formulas, and draws against the law."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashc.runtime.errors import RequestError
from dflashc.runtime.sampling import Purpose, SamplingParameters, draw, probabilities, sample, uniform

ALL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def expected_law(logits: list[float], history: list[int], p: SamplingParameters) -> dict[int, float]:
    """The chain of filters, token by token, as the documentation of llama.cpp's samplers defines them."""
    logits = list(logits)
    recent = history[-p.repeat_last_n :] if p.repeat_last_n > 0 else history if p.repeat_last_n < 0 else []
    for token in set(recent):
        logits[token] *= p.repeat_penalty if logits[token] <= 0 else 1 / p.repeat_penalty
        logits[token] -= recent.count(token) * p.frequency_penalty + p.presence_penalty
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if p.temperature == 0:
        return {order[0]: 1.0}
    if p.top_k:
        order = order[: p.top_k]
    weights = {token: math.exp(logits[token] - logits[order[0]]) for token in order}
    total, reached, kept = sum(weights.values()), 0.0, []
    for token in order:
        kept.append(token)
        reached += weights[token] / total
        if p.top_p < 1 and reached >= p.top_p:
            break
    kept = [token for token in kept if weights[token] >= p.min_p]
    heated = {token: math.exp((logits[token] - logits[order[0]]) / p.temperature) for token in kept}
    return {token: weight / sum(heated.values()) for token, weight in heated.items()}


# Values with room between them, so that no rounding decides what a filter keeps.
LOGITS = st.lists(st.integers(-8, 8), min_size=1, max_size=12)
PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([0.0, 0.31, 0.87, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    repeat_last_n=st.sampled_from([-1, 0, 2, 64]),
    frequency_penalty=st.sampled_from([0.0, 0.41]),
    presence_penalty=st.sampled_from([0.0, 0.73]),
    seed=st.just(1),
)


@settings(max_examples=300)
@given(LOGITS, st.lists(st.integers(0, 11), max_size=6), PARAMETERS)
def test_the_law(logits: list[int], history: list[int], parameters: SamplingParameters) -> None:
    history = [token % len(logits) for token in history]
    ids, law = probabilities(np.asarray(logits, np.float32), history, parameters)
    expected = expected_law(list(map(float, logits)), history, parameters)
    assert ids.tolist() == list(expected)
    np.testing.assert_allclose(law, list(expected.values()), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [3, 1, 2, 0]),
        ({"top_k": 2}, [3, 1]),
        ({"top_k": 99}, [3, 1, 2, 0]),
        ({"top_p": 0.5}, [3]),
        ({"top_p": 0.56}, [3, 1]),
        ({"min_p": 0.4}, [3, 1]),
        ({"top_p": 0.0}, [3]),
        ({"min_p": 1.0}, [3]),
        ({"top_k": 1}, [3]),
        ({"temperature": 0.0}, [3]),
    ],
)
def test_filters_by_hand(changes: dict[str, Any], kept: list[int]) -> None:
    """Probabilities 0.05, 0.25, 0.15, 0.55."""
    logits = np.log(np.array([0.05, 0.25, 0.15, 0.55])).astype(np.float32)
    ids, law = probabilities(logits, [], SamplingParameters(**{**ALL, **changes}))
    assert ids.tolist() == kept
    assert law.sum() == pytest.approx(1)


def test_top_p_comes_before_temperature() -> None:
    """A high temperature flattens the law but lets nothing in that top-p left out."""
    logits = np.log(np.array([0.9, 0.05, 0.05])).astype(np.float32)
    ids, _ = probabilities(logits, [], SamplingParameters(**{**ALL, "top_p": 0.9, "temperature": 50.0}))
    assert ids.tolist() == [0]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    greedy = SamplingParameters(temperature=0)
    assert sample(np.array([1, 5, 5, 2], np.float32), [], 0, greedy) == 1
    assert (
        sample(np.array([1, 5, 5, 2], np.float32), [1], 0, SamplingParameters(temperature=0, presence_penalty=1)) == 2
    )


def test_ties_at_the_edge_of_top_k_keep_the_lower_ids() -> None:
    logits = np.array([1, 2, 1, 2, 1], np.float32)
    ids, _ = probabilities(logits, [], SamplingParameters(**{**ALL, "top_k": 3}))
    assert ids.tolist() == [1, 3, 0]


def test_a_large_vocabulary_is_sorted_like_a_small_one() -> None:
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32).round(2)
    ids, _ = probabilities(logits, [], SamplingParameters(**{**ALL, "top_k": 200}))
    assert ids.tolist() == sorted(range(5000), key=lambda token: (-logits[token], token))[:200]


def test_tokens_that_cannot_be_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    ids, law = probabilities(logits, [], SamplingParameters(**ALL))
    assert dict(zip(ids.tolist(), law.tolist(), strict=True)) == {1: 0.5, 3: 0.5, 0: 0.0, 2: 0.0}
    assert {draw(ids, law, number) for number in (0.0, 0.49, 0.51, math.nextafter(1, 0))} == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error(bad: float) -> None:
    for logits in ([0, bad, 1], [bad]):
        with pytest.raises(RequestError, match=r"largest logit is (nan|inf)"):
            probabilities(np.array(logits, np.float32), [], SamplingParameters())
    with pytest.raises(RequestError, match="largest logit is -inf"):
        probabilities(np.full(3, -np.inf, np.float32), [], SamplingParameters())


def test_the_lowest_temperature_is_greedy() -> None:
    _, law = probabilities(np.array([0, 3, 1], np.float32), [], SamplingParameters(**{**ALL, "temperature": 1e-320}))
    assert law.tolist() == [1, 0, 0]


def test_the_logits_passed_in_stay_as_they_are() -> None:
    logits = np.array([1, 2, 3], np.float32)
    probabilities(logits, [2, 2], SamplingParameters(repeat_penalty=2.0))
    assert logits.tolist() == [1, 2, 3]


def test_draws_follow_the_law() -> None:
    """Chi-square over 20 000 positions; 16.27 is the 0.999 quantile with 3 degrees of freedom. Seeded: no chance."""
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    parameters = SamplingParameters(**ALL, seed=7)
    logits = np.log(shares).astype(np.float32)
    counts = np.bincount([sample(logits, [], position, parameters) for position in range(20_000)], minlength=4)
    expected = shares * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 16.27


def test_draw_picks_the_share_that_holds_the_number() -> None:
    ids, law = np.array([7, 2, 9]), np.array([0.5, 0.25, 0.25])
    assert [draw(ids, law, number) for number in (0.0, 0.4999, 0.5, 0.7499, 0.75, 0.9999)] == [7, 7, 2, 2, 9, 9]


def test_random_numbers_depend_on_their_key_alone() -> None:
    def numbers(order: Any) -> dict[tuple[int, int, int], float]:
        return {key: uniform(key[0], key[1], Purpose(key[2])) for key in order}

    keys = [(seed, position, purpose) for seed in (0, 2**64 - 1) for position in range(50) for purpose in Purpose]
    assert numbers(keys) == numbers(reversed(keys))
    assert len(set(numbers(keys).values())) == len(keys)
    assert all(0 <= number < 1 for number in numbers(keys).values())


def test_random_numbers_stay_the_same_between_versions() -> None:
    """Philox 4x64 with ten rounds, its words as the Random123 paper defines them; the upper 53 bits of the first."""

    def philox(counter: list[int], key: list[int]) -> int:
        mask = 2**64 - 1
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
            counter = [(b >> 64) ^ counter[1] ^ key[0], b & mask, (a >> 64) ^ counter[3] ^ key[1], a & mask]
            key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
        return counter[0]

    for seed, position, purpose in [
        (0, 0, Purpose.SAMPLE),
        (123, 4567, Purpose.RESAMPLE),
        (2**64 - 1, 1, Purpose.DRAFT),
    ]:
        # NumPy counts up before it takes a block.
        expected = philox([1, position, 0, 0], [seed, int(purpose)]) >> 11
        assert uniform(seed, position, purpose) == expected / 2**53


def test_a_seed_repeats_and_another_does_not() -> None:
    logits = np.zeros(1000, np.float32)

    def tokens(parameters: SamplingParameters) -> list[int]:
        return [sample(logits, [], position, parameters) for position in range(20)]

    assert tokens(SamplingParameters(**ALL, seed=5)) == tokens(SamplingParameters(**ALL, seed=5))
    assert tokens(SamplingParameters(**ALL, seed=5)) != tokens(SamplingParameters(**ALL, seed=6))
    assert tokens(SamplingParameters(**ALL)) != tokens(SamplingParameters(**ALL))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected a number from 0.0 to 100.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1', expected a number"),
        ({"top_k": -1}, "top_k is -1, expected a whole number from 0 to"),
        ({"top_k": 1.5}, "top_k is 1.5, expected a whole number"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 1.1}, "top_p is 1.1, expected a number from 0.0 to 1.0"),
        ({"min_p": -1}, "min_p is -1"),
        ({"repeat_penalty": 0}, "repeat_penalty is 0, expected a number from 0.01"),
        ({"repeat_last_n": -2}, "repeat_last_n is -2"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"presence_penalty": None}, "presence_penalty is None"),
        ({"seed": -1}, "seed is -1, expected a whole number from 0"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParameters(**changes)
