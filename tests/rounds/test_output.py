"""Speculation changes how fast a text comes, never the text: greedy and sampled, at every width, with any drafter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflashc.recipes.counting import PERIOD, VOCABULARY, proposal_of_the_blind
from dflashc.runtime.sampling import SamplingParameters, sample
from dflashc.runtime.session import Session
from tests.proof.comparing import recorded
from tests.rounds.building import Workshop
from tests.rounds.files import counted
from tests.rounds.inside import read, same_committed, traffic
from tests.rounds.running import MATCH, MIXED, WIDTHS, afresh, generate

TARGET_OF = {
    **dict.fromkeys(("pycode-v1", "pycode-v2", "pycode-v1-whole", "pycode-v2-whole"), "pycode"),
    **dict.fromkeys(("pycode-v1-q8", "pycode-v2-q8"), "pycode-q8"),
    **dict.fromkeys(("oracle-v1", "oracle-v2", "blind"), "counting"),
    **dict.fromkeys(("random", "windowed-v1", "windowed-v1-q8", "windowed-v2", "d5", "reduced", "short", "padded",
                     "identity"),
                    "random-alone"),
}
PAIRS = sorted(TARGET_OF)
SAMPLERS = {
    "default": SamplingParameters(seed=1),
    "hot": SamplingParameters(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, seed=2),
    "penalties": SamplingParameters(temperature=0.7, repeat_penalty=1.2, frequency_penalty=0.1, seed=3),
    "penalised arg-max": SamplingParameters(temperature=0.0, repeat_penalty=1.3),
}


def prompts(name: str) -> list[list[int]]:
    if name.startswith("pycode"):
        return [run["prompt_ids"] for run in recorded("golden-pycode-3m-q8_0")["greedy"][:4]]
    noise = np.random.default_rng(0).integers(0, VOCABULARY, 70).tolist()
    return [counted(37, 20), noise, [5]]


@pytest.mark.parametrize("name", PAIRS)
def test_greedy_text_is_that_of_the_target_alone(name: str, workshop: Workshop) -> None:
    session, alone = workshop.session(name), workshop.session(TARGET_OF[name])
    for prompt in prompts(name):
        expected = afresh(alone, prompt, 48)
        for width in (*WIDTHS, None):
            assert afresh(session, prompt, 48, width) == expected, width


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAIRS if not name.startswith("pycode")])
def test_greedy_text_in_float32(name: str, float32_workshop: Workshop) -> None:
    test_greedy_text_is_that_of_the_target_alone(name, float32_workshop)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAIRS if name.startswith("pycode")])
def test_greedy_text_in_float16(name: str, float16_workshop: Workshop) -> None:
    test_greedy_text_is_that_of_the_target_alone(name, float16_workshop)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", ["pycode-v1", "pycode-v2", "pycode-v2-q8", "pycode-v2-whole", "windowed-v2"])
def test_sampled_text_is_that_of_the_target_alone(name: str, sampler: str, workshop: Workshop) -> None:
    """Where proposals are kept that match what is drawn, the same random number decides each token, whoever proposed
    it, and whoever draws: here the host, there a kernel."""
    session, alone = workshop.session(name), workshop.session(TARGET_OF[name])
    kept = 0
    for prompt in prompts(name)[:2]:
        expected = drawn_by_the_host(alone, prompt, 40, SAMPLERS[sampler])
        for width in (*WIDTHS, None):
            assert afresh(session, prompt, 40, width, SAMPLERS[sampler], MATCH) == expected, width
            kept += session.statistics.accepted
    assert kept > 0 or not name.startswith("pycode")


def drawn_by_the_host(session: Session, prompt: list[int], count: int, parameters: SamplingParameters) -> list[int]:
    """Plain decoding, a row of logits at a time."""
    session.rewind(0)
    session.prefill(prompt, "logits")
    tokens: list[int] = []
    while len(tokens) < count:
        history = [*prompt, *tokens]
        tokens.append(sample(session.logits(1)[0], history, len(history), parameters))
        session.decode(tokens[-1:], "logits", 0, 1)
    return tokens


@pytest.mark.parametrize("name", ["oracle-v1", "oracle-v2"])
@pytest.mark.parametrize("first", range(7, VOCABULARY, 4 * PERIOD))
def test_the_oracle_commits_whole_blocks(name: str, first: int, workshop: Workshop) -> None:
    session = workshop.session(name)
    for width in WIDTHS:
        prompt, rest = counted(first, 20), counted(first, 20 + 1 + 3 * 16)[20:]
        assert afresh(session, prompt, 1) == rest[:1]
        for begin in range(0, 3 * (width + 1), width + 1):
            assert session.round(rest[begin], width) == rest[begin + 1 : begin + width + 2]
        assert (session.statistics.accepted, session.statistics.rounds) == (3 * width, 3)


def test_the_oracle_is_wrong_where_it_was_deceived(workshop: Workshop) -> None:
    """A foreign token in the prompt spoils the proposal for the place that looks at it, and so every later one."""
    session = workshop.session("oracle-v1")
    circle, foreign = counted(30, 64), 200
    for width in WIDTHS:
        for kept in range(width):
            prompt = circle[:24]
            prompt[24 + 1 + kept - (PERIOD + 1)] = foreign
            session.rewind(0)
            session.prefill(prompt, "ids")
            assert session.round(circle[24], width) == circle[25 : 26 + kept]


def test_the_blind_commits_one_token(workshop: Workshop) -> None:
    session, wrong = workshop.session("blind"), proposal_of_the_blind(workshop.options("blind").model)
    for width in WIDTHS:
        rest = counted(100, 26)[20:]
        assert afresh(session, counted(100, 20), 1) == rest[:1]
        for anchor, following in itertools.pairwise(rest):
            assert session.round(anchor, width) == [following]
            assert read(session, "tokens", "int32")[1 : width + 1].tolist() == [wrong] * width


@pytest.mark.parametrize("name", ["pycode-v1", "pycode-v2", "oracle-v2", "blind"])
@pytest.mark.parametrize("sampler", [None, "default"])
def test_counters_add_up(name: str, sampler: str | None, workshop: Workshop) -> None:
    session = workshop.session(name)
    parameters = {} if sampler is None else {"parameters": SAMPLERS[sampler]}
    for prompt in prompts(name):
        out = afresh(session, prompt, 48, **parameters)
        s = session.statistics
        assert len(out) == s.generated == 48 == 1 + s.rounds + s.accepted
        assert (s.prompt, s.cached) == (len(prompt), 0)
        assert s.drafted == sum(s.offered) >= s.accepted == sum(s.reached)
        assert s.rounds > s.offered[0]  # some rounds are plain
        assert s.offered == sorted(s.offered, reverse=True)
        assert s.reached == sorted(s.reached, reverse=True)
        assert all(r <= o for r, o in zip(s.reached, s.offered, strict=True))


@pytest.mark.parametrize("head", ["ids", "draw"])
@pytest.mark.parametrize("name", ["pycode-v1", "pycode-v2", "pycode-v1-whole", "oracle-v1"])
def test_a_round_is_one_wait_and_one_short_read(name: str, head: str, workshop: Workshop) -> None:
    session = workshop.session(name)
    (anchor,) = afresh(session, prompts(name)[0], 1, 0, SAMPLERS["default"])
    anchor = session.round(anchor, 0, head)[-1]
    for width in (15, 4, 0, *MIXED):
        with traffic(session) as seen:
            anchor = session.round(anchor, width, head)[-1]
        assert (seen.uploaded, seen.synchronisations) == (0, 1)
        assert 0 < seen.downloaded <= 256


def test_an_anchor_of_the_caller_replaces_the_one_on_the_device(workshop: Workshop) -> None:
    """The device holds what the last round said; a caller may go on with another token, or from another place."""
    session, fresh = workshop.session("pycode-v2"), workshop.session("pycode-v2")
    prompt = prompts("pycode")[1]
    generate(session, prompt, 20, 7)

    def check(length: int, anchor: int) -> int:
        session.rewind(length)
        said = list(session.tokens)
        fresh.rewind(0)
        fresh.prefill(said, "ids")
        after = session.round(anchor, 7)
        assert after == fresh.round(anchor, 7)
        assert same_committed(session, fresh)
        return after[-1]

    for length, anchor in ((len(session.tokens), 11), (len(prompt) + 3, 12), (len(prompt), 11)):
        last = check(length, anchor)
    session.sampled_round(13, 4, SAMPLERS["hot"])
    check(len(session.tokens), last)
