"""The sampler's kernels against the host's law, token by token."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dflashc.runtime.device_sampling import MOST_CANDIDATES, sampling_words
from dflashc.runtime.sampling import SamplingParameters, sample
from dflashc.targets.gpu.kernels.candidates import SEGMENT, segments_of
from dflashc.targets.gpu.kernels.penalties import penalised_candidates
from dflashc.targets.gpu.kernels.sampler import draw
from dflashc.targets.gpu.traits import Traits
from tests.targets.cpu.test_sampler import (
    ALL,
    FILTERS,
    HISTORY,
    QUANTILE_7,
    SHARES,
    TOKENS,
    VOCABULARY,
    by_formula,
    chi_square,
    expected_of_filters,
    host,
    random_logits,
)
from tests.targets.gpu.running import run_kernel
from tests.targets.gpu.test_candidates import merged

TRAITS = Traits("vulkan", "generic")
NOTHING = np.zeros(1, np.int32)
PENALTIES = [
    SamplingParameters(temperature=1.0, repeat_penalty=repeat, repeat_last_n=last, frequency_penalty=frequency,
                       presence_penalty=presence, seed=11)
    for repeat, last, (frequency, presence) in itertools.product(
        (1.0, 1.3, 0.7), (-1, 0, 1, 7), ((0.0, 0.0), (0.41, 0.73), (-0.3, 0.0)))]


def candidates(logits: np.ndarray, parameters: SamplingParameters, history: np.ndarray = NOTHING[:0],
               tokens: np.ndarray = NOTHING, first: int = 0, count: int = MOST_CANDIDATES,
               ) -> tuple[np.ndarray, np.ndarray]:
    """Values and ids of the best penalised logits of every row, (M, count)."""
    rows, columns = logits.shape
    value = np.full((rows, segments_of(columns), count), np.nan, np.float32)
    *_, value, index = run_kernel(penalised_candidates(TRAITS, count), [
        logits, tokens, np.array([history.size, first]), history if history.size else NOTHING,
        sampling_words(parameters, columns).view(np.uint64), value, np.empty(value.shape, np.int32), columns],
        rows * value.shape[1])
    return merged(value, index)


def drawn_among(best: np.ndarray, token: np.ndarray, parameters: SamplingParameters, committed: int,
                first: int = 0) -> list[int]:
    """Tokens of all rows of candidates."""
    *_, ids = run_kernel(draw(TRAITS), [best, token, np.array([committed, first]),
                                        sampling_words(parameters, MOST_CANDIDATES).view(np.uint64),
                                        np.full(len(best), -7, np.int32)], len(best))
    return ids.tolist()


def drawn(logits: np.ndarray, parameters: SamplingParameters, history: np.ndarray = NOTHING[:0],
          tokens: np.ndarray = NOTHING, first: int = 0) -> list[int]:
    """Tokens of all rows; a head's first row is row `first` of the run over `tokens`."""
    return drawn_among(*candidates(logits, parameters, history, tokens, first), parameters, history.size, first)


def test_filters_and_draws_of_the_host() -> None:
    best, token = candidates(random_logits(48, VOCABULARY), ALL)
    for parameters, expected in zip(FILTERS, expected_of_filters(), strict=True):
        assert drawn_among(best, token, parameters, 100) == expected, parameters


@pytest.mark.parametrize("columns", [1, 5, SEGMENT, 3 * SEGMENT + 77])
def test_vocabularies(columns: int) -> None:
    parameters = replace(ALL, top_k=min(columns, 64))
    logits = random_logits(16, columns)
    assert drawn(logits, parameters) == host(logits, parameters, 1)


@pytest.mark.parametrize("parameters", [replace(ALL, top_k=k, top_p=p) for k in (7, 64) for p in (0.5, 1.0)])
def test_ties(parameters: SamplingParameters) -> None:
    """Equal logits, and few distinct ones: lower ids come first, at the edge of top-k too."""
    logits = np.random.default_rng(5).integers(0, 3, (64, 200)).astype(np.float32)
    logits[::2] = 0
    assert drawn(logits, parameters) == host(logits, parameters, 1)
    greedy = replace(parameters, temperature=0.0)
    assert drawn(logits, greedy) == logits.argmax(axis=1).tolist()


def test_broken_logits_are_marked() -> None:
    """In their own row alone."""
    logits = random_logits(5, 30).copy()
    logits[0], logits[2] = np.nan, -np.inf
    logits[3, 5] = np.inf
    logits[4, 10:] = -np.inf
    tokens = drawn(logits, ALL)
    assert [tokens[0], *tokens[2:4]] == [-1, -1, -1]
    assert [tokens[1], tokens[4]] == [sample(logits[row], [], row + 1, ALL) for row in (1, 4)]


@pytest.mark.parametrize("first", [0, 5])
def test_penalties(first: int) -> None:
    """Each row sees the committed tokens and those of the run up to its own."""
    logits = random_logits(16 - first, VOCABULARY)
    for parameters in PENALTIES:
        best, ids = candidates(logits, parameters, HISTORY, TOKENS, first, count=256)
        tokens = drawn(logits, parameters, HISTORY, TOKENS, first)
        for row, line in enumerate(logits):
            text = [*HISTORY.tolist(), *TOKENS[: first + row + 1].tolist()]
            last = parameters.repeat_last_n
            recent = text if last < 0 else text[len(text) - min(last, len(text)) :]
            after = by_formula(line, recent, parameters)
            order = np.argsort(-after, kind="stable")
            np.testing.assert_array_equal(ids[row, :VOCABULARY], order)
            np.testing.assert_array_equal(best[row, :VOCABULARY], after[order])
            assert tokens[row] == sample(line, text, len(text), parameters)


def test_penalties_of_long_texts() -> None:
    """More recent tokens than are looked through at once, in a vocabulary of several segments; one fills a chunk."""
    rng = np.random.default_rng(3)
    columns = 2 * SEGMENT + 100
    history = rng.integers(0, columns, 3 * SEGMENT + 5).astype(np.int32)
    history[SEGMENT : 2 * SEGMENT] = SEGMENT + 1
    logits = rng.standard_normal((1, columns)).astype(np.float32)
    parameters = replace(ALL, repeat_last_n=-1, repeat_penalty=1.1, frequency_penalty=0.01, presence_penalty=0.3)
    best, ids = candidates(logits, parameters, history, TOKENS[:1])
    after = by_formula(logits[0], [*history.tolist(), int(TOKENS[0])], parameters)
    order = np.argsort(-after, kind="stable")[:MOST_CANDIDATES]
    np.testing.assert_array_equal(ids[0], order)
    np.testing.assert_array_equal(best[0], after[order])


def test_rows_are_independent() -> None:
    """A row alone, or behind and before others, has the same bits and the same token."""
    parameters = SamplingParameters(repeat_penalty=1.1, presence_penalty=0.5, seed=9)
    logits = random_logits(16, VOCABULARY)
    best, ids = candidates(logits, parameters, HISTORY, TOKENS)
    tokens = drawn(logits, parameters, HISTORY, TOKENS)
    for rows in (1, 2, 8, 15):
        for found, all_rows in zip(candidates(logits[:rows], parameters, HISTORY, TOKENS), (best, ids), strict=True):
            np.testing.assert_array_equal(found, all_rows[:rows])
        assert drawn(logits[:rows], parameters, HISTORY, TOKENS) == tokens[:rows]
        text = np.concatenate([HISTORY, TOKENS[:rows]])
        assert drawn(logits[rows : rows + 1], parameters, text, TOKENS[rows:]) == tokens[rows : rows + 1]


def test_draws_follow_the_law() -> None:
    """20 000 positions with one seed."""
    best, token = candidates(np.log(SHARES).astype(np.float32)[None], ALL)
    tokens = drawn_among(np.tile(best, (20_000, 1)), np.tile(token, (20_000, 1)), ALL, 0)
    assert chi_square(np.bincount(tokens, minlength=8), SHARES) < QUANTILE_7
