"""Rejection sampling on a GPU: token by token as the papers have it, and in bulk as the target's law has it."""

from __future__ import annotations

import numpy as np
import pytest

from dflashc.runtime.device_sampling import MOST_CANDIDATES, sampling_words
from dflashc.runtime.sampling import SamplingParameters, probabilities
from dflashc.targets.gpu.kernels.rejection import judge
from dflashc.targets.gpu.traits import Traits
from tests.reference.rejection import pick
from tests.targets.cpu.test_rejection import (
    CANDIDATES,
    LAWS,
    SAMPLERS,
    P,
    bulk,
    check_broken_logits,
    check_law,
    check_tokens_of_the_reference,
    laws_of,
    numbers,
)
from tests.targets.gpu.running import run_kernel
from tests.targets.gpu.test_candidates import merged, top

TRAITS = Traits("vulkan", "generic")
COUNT = 30_000


def judged(logits: np.ndarray, proposals: np.ndarray, q: np.ndarray, parameters: SamplingParameters,
           committed: int = 0, draft_temperature: float = 1.0) -> np.ndarray:
    """Tokens of all rows of logits (M, V), of which all but the last have a proposal, drawn from q (M - 1, V)."""
    rows, columns = logits.shape
    words = sampling_words(parameters, columns, draft_temperature).view(np.uint64)
    *_, ids = run_kernel(judge(TRAITS, CANDIDATES), [
        *merged(*top(logits, MOST_CANDIDATES)), np.array([committed, 0]), words, np.array([-1, *proposals], np.int32),
        *laws_of(q), np.full(rows, -7, np.int32), rows], rows)
    return ids


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_tokens_of_the_reference(sampler: str) -> None:
    check_tokens_of_the_reference(judged, SAMPLERS[sampler])


def test_broken_logits_are_marked() -> None:
    check_broken_logits(judged)


@pytest.mark.parametrize("name", LAWS)
def test_single_tokens_follow_the_law(name: str) -> None:
    """Over 30 000 positions with one seed."""
    q, parameters = LAWS[name]
    logits, law = np.log(P).astype(np.float32), np.zeros(8)
    tokens = judged(bulk(logits, COUNT + 1), pick(bulk(q, COUNT), numbers(1, COUNT).draft), bulk(q, COUNT), parameters)
    ids, shares = probabilities(logits, [], parameters)
    law[ids] = shares
    check_law(tokens[:-1], law)


