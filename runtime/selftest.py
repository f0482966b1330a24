"""The self-test of an artefact: fixed prompts whose greedy continuation must come out as recorded at build time.

Prompts are token ids made by formula, so they need no tokenizer and exercise every prefill program.
"""

from __future__ import annotations

from typing import Any

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.base import Device
from dflashc.runtime.errors import ArtefactError
from dflashc.runtime.manifest import SelfTest
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from dflashc.runtime.width import FixedWidth

_LENGTHS = (1, 23, 85)
_CONTINUATION = 16


def prompts(vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """Prompts of several lengths, tokens spread over the vocabulary by a multiplicative generator."""
    return [tuple((i * 2654435761 + length) % vocabulary for i in range(1, length + 1))
            for length in _LENGTHS if length + _CONTINUATION <= context]


def record(artefact: Artefact, device: Device[Any]) -> tuple[SelfTest, ...]:
    """Run the prompts and return what came out."""
    session = _session(artefact, device)
    return tuple(SelfTest(p, _continuation(session, p)) for p in prompts(session.vocabulary, session.context))


def run(artefact: Artefact, device: Device[Any]) -> None:
    """Raise `ArtefactError` unless every prompt continues as recorded, at every draft width."""
    if not artefact.manifest.self_test:
        raise ArtefactError("the artefact has no self-test: it was built on a machine that cannot run it")
    session = _session(artefact, device)
    for number, test in enumerate(artefact.manifest.self_test, start=1):
        for width in range(session.most_width + 1):
            found = _continuation(session, test.prompt, width)
            if found != test.expected:
                raise ArtefactError(f"self-test {number}, width {width}: tokens {list(found)} found, "
                                    f"{list(test.expected)} expected; the artefact does not compute on this "
                                    "machine what it did when it was built")


def _session(artefact: Artefact, device: Device[Any]) -> Session:
    return Session(artefact, device, min(artefact.plan.max_context, 256))


def _continuation(session: Session, prompt: tuple[int, ...], width: int = 0) -> tuple[int, ...]:
    session.rewind(0)
    greedy = SamplingParameters(temperature=0.0)
    return tuple(session.generate(prompt, greedy, _CONTINUATION, width=FixedWidth(width)))
