"""The self-test of an artefact: fixed prompts, whose greedy continuation must come out as recorded at build time.

Builds do not look at GPUs: there it must come out the same at every draft width and however the prompt is cut, and
where the build was given what a CPU recorded, the same as there but for near ties, since other devices round otherwise.
Prompts are token ids made by formula, so they need no tokenizer and exercise every prefill program.
"""

from __future__ import annotations

from typing import Any

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.base import Device
from dflashc.runtime.device.opening import GPU_MODULES
from dflashc.runtime.errors import ArtefactError
from dflashc.runtime.manifest import SelfTest
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from dflashc.runtime.width import FixedWidth

_LENGTHS = (1, 23, 85)
_CONTINUATION = 16
_NEAR_TIE = 0.1  # standard deviations of the logits


def prompts(vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """Prompts of several lengths, tokens spread over the vocabulary by a multiplicative generator."""
    return [tuple((i * 2654435761 + length) % vocabulary for i in range(1, length + 1))
            for length in _LENGTHS if length + _CONTINUATION <= context]


def record(artefact: Artefact, device: Device[Any]) -> tuple[SelfTest, ...]:
    """Run the prompts and return what came out."""
    session = _session(artefact, device)
    return tuple(SelfTest(p, _continuation(session, p)) for p in prompts(session.vocabulary, session.context))


def run(artefact: Artefact, device: Device[Any]) -> str:
    """Continue every prompt at every draft width, and say in a few words what was compared.

    Raises `ArtefactError` at the first that comes out differently.
    """
    session = _session(artefact, device)
    recorded, elsewhere = artefact.manifest.self_test, artefact.manifest.requirements.machine in GPU_MODULES
    for number, test in enumerate(recorded, start=1):
        _check(number, test, session)
    tests, meant = recorded, "the artefact does not compute here what it did when it was built"
    if elsewhere or not recorded:
        asked = [t.prompt for t in recorded] or prompts(session.vocabulary, session.context)
        tests = tuple(SelfTest(p, _token_by_token(session, p)) for p in asked)
        meant = "this device does not compute the same in programs of other sizes"
    for number, test in enumerate(tests, start=1):
        for width in range(session.most_width + 1):
            found = _continuation(session, test.prompt, width)
            if found != test.expected:
                raise ArtefactError(f"self-test {number}, width {width}: tokens {list(found)} found, "
                                    f"{list(test.expected)} expected; {meant}")
    if not recorded:
        return f"{len(tests)} prompts continued alike at every width and cut (none was recorded)"
    if not elsewhere:
        return f"{len(tests)} prompts continued as recorded"
    ties = [_compare(session, number, found, test.expected)
            for number, (found, test) in enumerate(zip(tests, recorded, strict=True), start=1)]
    but = ", ".join(filter(None, ties))
    return f"{len(tests)} prompts continued alike at every width and cut, and as recorded on a CPU" + (
        f" up to near ties ({but})" if but else "")


def _check(number: int, test: SelfTest, session: Session) -> None:
    """Raise `ArtefactError` for a recorded test that no build would have written: manifests can be edited."""
    tokens = (*test.prompt, *test.expected)
    if (not test.prompt or len(test.expected) != _CONTINUATION or len(tokens) > session.context
            or not all(0 <= token < session.vocabulary for token in tokens)):
        raise ArtefactError(f"self-test {number} in the manifest is damaged: expected a prompt and {_CONTINUATION} "
                            f"tokens of a vocabulary of {session.vocabulary}, within {session.context}; build again")


def _compare(session: Session, number: int, found: SelfTest, recorded: tuple[int, ...]) -> str:
    """Where the device parts from what another recorded, "" for nowhere. Raises `ArtefactError` unless at a near tie:
    the device must hold the recorded token for almost as likely as its own.
    """
    parts = [i for i, (a, b) in enumerate(zip(found.expected, recorded, strict=True)) if a != b]
    if not parts:
        return ""
    first = parts[0]
    session.rewind(0)
    session.prefill([*found.prompt, *found.expected[:first]], "logits")
    (logits,) = session.logits(1)
    gap = float(logits[found.expected[first]] - logits[recorded[first]]) / float(logits.std())
    if not gap <= _NEAR_TIE:
        raise ArtefactError(f"self-test {number}, token {first + 1}: {found.expected[first]} found, {recorded[first]} "
                            f"expected, whose logit is {gap:.2f} standard deviations lower here (a near tie is up to "
                            f"{_NEAR_TIE}): this device does not compute the model")
    return f"prompt {number}, token {first + 1}"


def _session(artefact: Artefact, device: Device[Any]) -> Session:
    return Session(artefact, device, min(artefact.plan.max_context, 256))


def _token_by_token(session: Session, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The continuation of a prompt of which every token was a run of its own."""
    session.rewind(0)
    for token in prompt:
        session.decode([token], None)
    return _generate(session, prompt, 0)


def _continuation(session: Session, prompt: tuple[int, ...], width: int = 0) -> tuple[int, ...]:
    session.rewind(0)
    return _generate(session, prompt, width)


def _generate(session: Session, prompt: tuple[int, ...], width: int) -> tuple[int, ...]:
    greedy = SamplingParameters(temperature=0.0)
    return tuple(session.generate(prompt, greedy, _CONTINUATION, width=FixedWidth(width)))
