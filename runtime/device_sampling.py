"""The sampler inside the programs: a request's parameters as its kernels read them, and which requests it serves.

Owns the layout of the "sampling" buffer. Knows nothing of kernels; the law itself is `sampling`'s.
"""

from __future__ import annotations

import math
import sys
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dflashc.runtime.sampling import SamplingParameters

MOST_CANDIDATES = 64
"""Tokens among which the kernels draw, at most."""


class Word(IntEnum):
    """Places in the "sampling" buffer, 8 bytes each: three integers, then float64."""

    SEED = 0
    CANDIDATES = 1
    """How many of the likeliest tokens stay: top-k; 1 at temperature 0."""
    WINDOW = 2
    """Recent tokens that are penalised; 0 where the penalties are off, 2^31 - 1 where they look at all."""
    TOP_P = 3
    """Infinite where top-p is off."""
    LOG_MIN_P = 4
    TEMPERATURE = 5
    REPEAT_PENALTY = 6
    FREQUENCY_PENALTY = 7
    PRESENCE_PENALTY = 8
    DRAFT_TEMPERATURE = 9
    """What the drafter's proposals are drawn at, and then judged by rejection; 0: the likeliest is proposed, and kept
    if it is what is drawn."""


def refusal(parameters: SamplingParameters, vocabulary: int) -> str | None:
    """Why the programs cannot draw for a request, None where they can."""
    candidates = _candidates(parameters, vocabulary)
    if candidates <= MOST_CANDIDATES:
        return None
    return (f"tokens are drawn on the host, which is slower: top-k {parameters.top_k} keeps {candidates} of them, the "
            f"compiled sampler at most {MOST_CANDIDATES}")


def sampling_words(parameters: SamplingParameters, vocabulary: int,
                   draft_temperature: float = 0.0) -> NDArray[np.int64]:
    """The contents of the "sampling" buffer for a request that is not refused, int64 (len(Word),)."""
    assert parameters.seed is not None  # set when the parameters were made
    window = parameters.repeat_last_n if parameters.repeat_last_n >= 0 else 2**31 - 1
    numbers = {
        Word.TOP_P: parameters.top_p if parameters.top_p < 1 else math.inf,
        Word.LOG_MIN_P: math.log(parameters.min_p) if parameters.min_p > 0 else -math.inf,
        # anything smaller has the same law, but is 0 to a device without denormal numbers
        Word.TEMPERATURE: max(parameters.temperature or 1.0, sys.float_info.min),
        Word.REPEAT_PENALTY: parameters.repeat_penalty,
        Word.FREQUENCY_PENALTY: parameters.frequency_penalty,
        Word.PRESENCE_PENALTY: parameters.presence_penalty,
        Word.DRAFT_TEMPERATURE: draft_temperature,
    }
    words = np.zeros(len(Word), np.int64)
    words[Word.SEED] = np.uint64(parameters.seed).view(np.int64)
    words[Word.CANDIDATES] = _candidates(parameters, vocabulary)
    words[Word.WINDOW] = window if parameters.is_penalised else 0
    for word, number in numbers.items():
        words[word] = np.float64(number).view(np.int64)
    return words


def _candidates(parameters: SamplingParameters, vocabulary: int) -> int:
    return 1 if parameters.temperature == 0 else min(parameters.top_k or vocabulary, vocabulary)
