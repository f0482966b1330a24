"""The sampler's kernels against the host's law, token by token; and draws against probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dflashc.runtime.device_sampling import MOST_CANDIDATES, sampling_words
from dflashc.runtime.sampling import SamplingParameters, sample
from dflashc.targets.cpu.kernels.sampler import draw, penalise
from dflashc.targets.cpu.kernels.selector import SEGMENT, top_candidates
from dflashc.targets.requests import KernelRequest
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

ALL = SamplingParameters(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
FILTERS = [
    SamplingParameters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=2**63 + number)
    for number, (temperature, top_k, top_p, min_p) in enumerate(itertools.product(
        (0.0, 1e-320, 0.5, 1.0, 1.7), (1, 3, 40, 64), (0.0, 0.31, 0.87, 1.0), (0.0, 0.07, 1.0)))]
PENALTIES = [
    SamplingParameters(temperature=temperature, repeat_penalty=repeat, repeat_last_n=last, frequency_penalty=frequency,
                       presence_penalty=presence, seed=11)
    for temperature, repeat, last, frequency, presence in itertools.product(
        (0.0, 1.0), (1.0, 1.3, 0.7), (-1, 0, 1, 7, 64), (0.0, 0.41, -0.3), (0.0, 0.73))]
VOCABULARY = 150
HISTORY = np.random.default_rng(1).integers(0, 12, 40).astype(np.int32)  # few tokens, so that they occur often
TOKENS = np.random.default_rng(2).integers(0, 12, 16).astype(np.int32)
QUANTILE_7, QUANTILE_63 = 24.32, 103.4
"""0.999 quantiles of chi-square with that many degrees of freedom. All is seeded: there is no chance in these tests."""


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest("draw", draw, ()), KernelRequest("penalise", penalise, ()),
                KernelRequest("top", top_candidates, (MOST_CANDIDATES,))]
    return Library(request.param, requests, tmp_path_factory.mktemp("sampler"))


def penalised(library: Library, logits: np.ndarray, parameters: SamplingParameters, history: np.ndarray,
              tokens: np.ndarray, first: int = 0) -> np.ndarray:
    """Logits of a head's rows after the penalties; its first row is row `first` of the run over `tokens`."""
    logits = logits.copy()
    rows, columns = logits.shape
    count = np.full((rows, columns), 12345, np.int32)  # whatever was left there
    library.run("penalise", [logits, tokens, np.array([history.size, first]), history,
                             sampling_words(parameters, columns), count, columns], rows)
    return logits


def drawn(library: Library, logits: np.ndarray, parameters: SamplingParameters, committed: int = 0,
          first: int = 0) -> list[int]:
    """Tokens of all rows of logits as they are."""
    rows, columns = logits.shape
    segments = -(-columns // SEGMENT)
    value = np.empty((rows, segments, MOST_CANDIDATES), np.float32)
    index, ids = np.empty(value.shape, np.int32), np.full(rows, -7, np.int32)
    library.run("top", [logits, value, index, columns], rows * segments)
    words = sampling_words(parameters, columns)
    library.run("draw", [value, index, np.array([committed, first]), words, ids, segments], rows)
    return ids.tolist()


@cache
def random_logits(rows: int, columns: int) -> np.ndarray:
    return (3 * np.random.default_rng(rows).standard_normal((rows, columns))).astype(np.float32)


def host(logits: np.ndarray, parameters: SamplingParameters, start: int) -> list[int]:
    """Tokens of the host, without penalties, from position `start` on."""
    return [sample(row, [], position, parameters) for position, row in enumerate(logits, start)]


@cache
def expected_of_filters() -> list[list[int]]:
    logits = random_logits(48, VOCABULARY)
    return [host(logits, parameters, 101) for parameters in FILTERS]


def test_filters_and_draws_of_the_host(library: Library) -> None:
    logits = random_logits(48, VOCABULARY)
    for parameters, expected in zip(FILTERS, expected_of_filters(), strict=True):
        assert drawn(library, logits, parameters, 100) == expected, parameters


@pytest.mark.parametrize("columns", [1, 5, 64, 65, SEGMENT, 3 * SEGMENT + 77])
def test_vocabularies(library: Library, columns: int) -> None:
    parameters = replace(ALL, top_k=min(columns, 64))
    logits = random_logits(16, columns)
    assert drawn(library, logits, parameters) == host(logits, parameters, 1)


@pytest.mark.parametrize("parameters", [replace(ALL, top_k=k, top_p=p) for k in (1, 7, 64) for p in (0.5, 0.95, 1.0)])
def test_ties(library: Library, parameters: SamplingParameters) -> None:
    """Equal logits, and few distinct ones: lower ids come first, at the edge of top-k too."""
    logits = np.random.default_rng(5).integers(0, 3, (64, 200)).astype(np.float32)
    logits[::2] = 0
    assert drawn(library, logits, parameters) == host(logits, parameters, 1)
    greedy = replace(parameters, temperature=0.0)
    assert drawn(library, logits, greedy) == logits.argmax(axis=1).tolist()


def test_tokens_that_cannot_be(library: Library) -> None:
    logits = np.full((1000, 20), -np.inf, np.float32)
    logits[:, [3, 8]] = 1
    tokens = drawn(library, logits, ALL)
    assert tokens == host(logits, ALL, 1)
    assert set(tokens) == {3, 8}


def test_broken_logits_are_marked(library: Library) -> None:
    """In their own row alone."""
    logits = random_logits(4, 30).copy()
    logits[0], logits[2] = np.nan, -np.inf
    logits[3, 5] = np.inf
    tokens = drawn(library, logits, ALL)
    assert [tokens[0], *tokens[2:]] == [-1, -1, -1]
    assert tokens[1] == sample(logits[1], [], 2, ALL)


def by_formula(logits: np.ndarray, recent: Sequence[int], p: SamplingParameters) -> np.ndarray:
    """llama.cpp's penalties, token by token, rounded to float32 at the end."""
    values = logits.copy()
    for token in set(recent):
        logit = float(logits[token])
        logit = logit / p.repeat_penalty if logit > 0 else logit * p.repeat_penalty
        values[token] = logit - (list(recent).count(token) * p.frequency_penalty + p.presence_penalty)
    return values


@pytest.mark.parametrize("first", [0, 5])
def test_penalties(library: Library, first: int) -> None:
    """Each row sees the committed tokens and those of the run up to its own."""
    logits = random_logits(16 - first, VOCABULARY)
    for parameters in PENALTIES:
        changed = penalised(library, logits, parameters, HISTORY, TOKENS, first)
        tokens = drawn(library, changed, parameters, HISTORY.size, first)
        for row, (before, after) in enumerate(zip(logits, changed, strict=True)):
            text = [*HISTORY.tolist(), *TOKENS[: first + row + 1].tolist()]
            last = parameters.repeat_last_n
            recent = text if last < 0 else text[len(text) - min(last, len(text)) :]
            np.testing.assert_array_equal(after, by_formula(before, recent, parameters))
            others = np.setdiff1d(np.arange(VOCABULARY), recent)
            np.testing.assert_array_equal(after[others], before[others])
            assert tokens[row] == sample(before, text, len(text), parameters)


def test_rows_are_independent(library: Library) -> None:
    """A row alone, or behind and before others, has the same bits and the same token."""
    parameters = SamplingParameters(repeat_penalty=1.1, presence_penalty=0.5, seed=9)
    logits = random_logits(16, VOCABULARY)
    changed = penalised(library, logits, parameters, HISTORY, TOKENS)
    tokens = drawn(library, changed, parameters, HISTORY.size)
    for rows in range(1, 17):
        some = penalised(library, logits[:rows], parameters, HISTORY, TOKENS)
        np.testing.assert_array_equal(some, changed[:rows])
        assert drawn(library, some, parameters, HISTORY.size) == tokens[:rows]
        last = slice(rows - 1, rows)
        text = np.concatenate([HISTORY, TOKENS[: rows - 1]])
        alone = penalised(library, logits[last], parameters, text, TOKENS[last])
        np.testing.assert_array_equal(alone, changed[last])
        assert drawn(library, alone, parameters, text.size) == tokens[last]


SHARES = np.array([0.28, 0.03, 0.2, 0.07, 0.13, 0.15, 0.05, 0.09])


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.8])
def test_draws_follow_the_law(library: Library, temperature: float) -> None:
    """100 000 positions with one seed: single tokens, and pairs of successive ones."""
    logits = np.tile(np.log(SHARES).astype(np.float32), (100_000, 1))
    tokens = np.array(drawn(library, logits, replace(ALL, temperature=temperature)))
    shares = SHARES ** (1 / temperature) / (SHARES ** (1 / temperature)).sum()
    assert chi_square(np.bincount(tokens, minlength=8), shares) < QUANTILE_7
    pairs = np.bincount(tokens[::2] * 8 + tokens[1::2], minlength=64)
    assert chi_square(pairs, np.outer(shares, shares).ravel()) < QUANTILE_63


def test_draws_of_truncated_laws(library: Library) -> None:
    """Top-k, top-p or min-p leaves out all but the four likeliest; 16.27 is the quantile with 3 degrees of freedom."""
    logits = np.tile(np.log(SHARES).astype(np.float32), (100_000, 1))
    kept = np.argsort(-SHARES)[:4]
    shares = SHARES[kept] / SHARES[kept].sum()
    for changes in ({"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.4}):
        counts = np.bincount(drawn(library, logits, replace(ALL, **changes)), minlength=8)
        assert counts[kept].sum() == 100_000
        assert chi_square(counts[kept], shares) < 16.27


def test_draws_over_seeds(library: Library) -> None:
    """One position, many seeds."""
    logits = np.log(SHARES).astype(np.float32)[None]
    counts = np.bincount([drawn(library, logits, replace(ALL, seed=s))[0] for s in range(4000)], minlength=8)
    assert chi_square(counts, SHARES) < QUANTILE_7
