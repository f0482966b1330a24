"""Which requests the programs can draw for, and the words they read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dflashc.runtime.device_sampling import Word, refusal, sampling_words
from dflashc.runtime.sampling import SamplingParameters


@pytest.mark.parametrize(("top_k", "vocabulary", "drawn"), [
    (40, 150_000, True), (64, 150_000, True), (65, 150_000, False), (0, 150_000, False), (0, 64, True),
    (100, 50, True)])
def test_candidates_decide(top_k: int, vocabulary: int, drawn: bool) -> None:
    reason = refusal(SamplingParameters(top_k=top_k), vocabulary)
    assert (reason is None) == drawn
    assert reason is None or f"top-k {top_k} " in reason


def test_temperature_0_needs_one_candidate() -> None:
    parameters = SamplingParameters(temperature=0, top_k=0, presence_penalty=1.0)
    assert refusal(parameters, 150_000) is None
    words = sampling_words(parameters, 150_000)
    assert words[Word.CANDIDATES] == 1
    assert words.view(np.float64)[Word.TEMPERATURE] == 1


@pytest.mark.parametrize(("changes", "window"), [
    ({}, 0), ({"presence_penalty": 1.0}, 64), ({"repeat_penalty": 1.1, "repeat_last_n": 0}, 0),
    ({"frequency_penalty": 1.0, "repeat_last_n": 7}, 7), ({"repeat_penalty": 1.1, "repeat_last_n": -1}, 2**31 - 1)])
def test_the_window_is_0_without_penalties(changes: dict[str, Any], window: int) -> None:
    assert sampling_words(SamplingParameters(**changes), 100)[Word.WINDOW] == window


def test_words() -> None:
    parameters = SamplingParameters(0.5, 7, 0.9, 0.25, 1.5, 3, 0.1, 0.2, seed=2**64 - 2)
    words = sampling_words(parameters, 100, 0.75)
    assert words[: Word.TOP_P].tolist() == [-2, 7, 3]
    assert words[Word.TOP_P :].view(np.float64).tolist() == [0.9, math.log(0.25), 0.5, 1.5, 0.1, 0.2, 0.75]


def test_filters_that_are_off_let_all_pass() -> None:
    words = sampling_words(SamplingParameters(top_p=1.0, min_p=0.0), 100).view(np.float64)
    assert (words[Word.TOP_P], words[Word.LOG_MIN_P]) == (math.inf, -math.inf)
