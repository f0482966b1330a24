"""The example model against llama.cpp: token ids, log-probabilities, greedy continuations; and against the reference.

llama.cpp's kernels are others, so agreement ends where it rounds otherwise: both round activations to int8 in front of
block formats, which leaves 0.01 on this model's log-probabilities, and 0.0005 in f16, where nothing is rounded to int8.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dflashc.runtime.tokenizer import Tokenizer
from tests.proof.comparing import Found, Golden, along_forced, along_greedy, errors
from tests.proof.running import greedy, session_of
from tests.reference.config import read_model
from tests.reference.functions import F16
from tests.reference.transformer import ReferenceModel, int8_activations


@dataclass(frozen=True)
class Case:
    """A quantisation, its artefact's fixture, and how far log-probabilities may be off on average."""

    quantisation: str
    fixture: str
    mean: float


CASES = [Case("f16", "pycode_f16_artefact", 0.002), Case("q8_0", "pycode_artefact", 0.02)]
DECIDED = 0.05
"""Lead in log-probability from which on the best token is no matter of rounding."""


@dataclass(frozen=True)
class Subject:
    """An artefact and what was said about its model."""

    case: Case
    artefact: Path
    golden: Golden


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.quantisation)
def subject(request: pytest.FixtureRequest, pycode_model: Path) -> Subject:
    case = request.param
    golden = Golden.load(f"pycode-3m-{case.quantisation}")
    model = pycode_model.with_name(f"pycode-3m-{case.quantisation}.gguf")
    assert hashlib.sha256(model.read_bytes()).hexdigest() == golden.document["model_sha256"]
    return Subject(case, request.getfixturevalue(case.fixture), golden)


@pytest.fixture(scope="module")
def found(subject: Subject) -> Found:
    with session_of(subject.artefact) as session:
        return along_forced(session, subject.golden)


def test_token_ids(subject: Subject) -> None:
    tokenizer = Tokenizer.load(subject.artefact / "tokenizer")
    for text in subject.golden.forced:
        assert tokenizer.encode(text["text"]) == text["ids"]
    for run in subject.golden.greedy:
        assert tokenizer.encode(run["prompt"]) == run["prompt_ids"]


def test_log_probabilities(subject: Subject, found: Found) -> None:
    assert np.nanmean(np.abs(found.following - subject.golden.following)) <= subject.case.mean


def test_best_tokens(subject: Subject, found: Found) -> None:
    assert (found.best == subject.golden.best).mean() >= 0.99


def test_every_decided_step_of_a_greedy_continuation(subject: Subject) -> None:
    with session_of(subject.artefact) as session:
        runs = along_greedy(session, subject.golden)
    assert [step.lead for run in runs for step in run if not step.agrees and step.lead >= DECIDED] == []


def test_greedy_continuations(subject: Subject) -> None:
    """Equal up to the first step that rounding decides."""
    with session_of(subject.artefact) as session:
        for run in subject.golden.greedy:
            expected = [best[0] for best, _ in run["steps"]]
            leads = [best[1] - second[1] for best, second in run["steps"]]
            decided = next((i for i, lead in enumerate(leads) if lead < DECIDED), len(leads))
            assert greedy(session, run["prompt_ids"], len(expected))[:decided] == expected[:decided]


@pytest.mark.parametrize(("quantisation", "fixture", "equal", "close"), [
    ("f16", "pycode_f16_artefact", 1e-5, 2e-4),
    ("q8_0", "pycode_artefact", 1e-6, 0.02),
    ("q4_k_m", "pycode_q4_k_m_artefact", 1e-6, 0.04),
])
def test_logits_of_the_reference(quantisation: str, fixture: str, equal: float, close: float, pycode_model: Path,
                                 request: pytest.FixtureRequest) -> None:
    """Where every activation rounds to the same int8 the logits are equal; one that does not moves what follows.

    Most runs over three tokens have no such activation, long texts have. Errors are relative to the largest logit.
    """
    ids = Golden.load("pycode-3m-q8_0").forced[1]["ids"]
    config, weights = read_model(pycode_model.with_name(f"pycode-3m-{quantisation}.gguf"))
    reference = ReferenceModel(config, weights, F16, int8_activations)
    with session_of(request.getfixturevalue(fixture)) as session:
        whole, pieces = errors(session, reference, ids)
    assert np.median(pieces) <= equal
    assert whole <= close
