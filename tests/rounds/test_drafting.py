"""Drafts that p-min cuts, and proposals that are accepted by one rule or the other: what is verified, and what said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflashc.runtime.drafting import DraftParameters
from dflashc.runtime.rounds import draft_programs
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from tests.proof.comparing import recorded
from tests.reference.config import read_drafter, read_model
from tests.reference.dflash import ReferenceDrafter
from tests.reference.functions import F16
from tests.reference.transformer import ReferenceModel, int8_activations
from tests.rounds.building import Workshop
from tests.rounds.inside import read, run, same_committed, traffic
from tests.rounds.running import MATCH, MIXED, REJECT, WIDTHS, afresh, generate
from tests.rounds.test_output import PAIRS, TARGET_OF, prompts

PROMPT = recorded("golden-pycode-3m-q8_0")["greedy"][0]["prompt_ids"]
SAMPLED = SamplingParameters(seed=6)
ON_HOST = replace(SAMPLED, top_k=65)
PYCODE = ["pycode-v1", "pycode-v2"]


def weighed(session: Session, width: int) -> tuple[list[int], np.ndarray]:
    """Proposals behind the committed tokens, and their confidence."""
    proposer = "weigh" if f"weigh.{width}" in session._plan.programs else "propose"
    run(session, *draft_programs(width, session._block_rows, proposer))
    return read(session, "tokens", "int32")[1 : width + 1].tolist(), read(session, "proposals.confidence", "float32")


@pytest.mark.parametrize("name", PAIRS)
def test_greedy_text_of_drafts_that_are_cut(name: str, workshop: Workshop) -> None:
    session, alone = workshop.session(name), workshop.session(TARGET_OF[name])
    for prompt, p_min in zip(prompts(name), (0.1, 0.5, 0.9, 1.0), strict=False):
        expected = afresh(alone, prompt, 40)
        for width in (*WIDTHS, None):
            assert afresh(session, prompt, 40, width, drafting=DraftParameters(p_min=p_min)) == expected, width


@pytest.mark.parametrize("parameters", [SAMPLED, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("name", PYCODE)
def test_sampled_text_of_drafts_that_are_cut(name: str, parameters: SamplingParameters, workshop: Workshop) -> None:
    session = workshop.session(name)
    expected = afresh(session, PROMPT, 60, 0, parameters)
    assert afresh(session, PROMPT, 60, 7, parameters, DraftParameters("match", 0.3)) == expected
    s = session.statistics
    assert s.drafted > s.accepted > 0
    assert s.cut > 0
    assert s.drafted + s.cut == sum(width * len(times) for width, times in s.round_seconds.items())
    assert s.generated == 1 + s.rounds + s.accepted


@pytest.mark.parametrize("name", [*PYCODE, "pycode-v2-whole", "oracle-v1"])
def test_a_draft_ends_before_the_first_unlikely_token(name: str, workshop: Workshop) -> None:
    """What is verified is the longest prefix of confidence p-min or more; nothing is left of the rest."""
    session, fresh = workshop.session(name), workshop.session(name)
    for prompt in prompts(name)[:2]:
        (anchor,) = afresh(session, prompt, 1)
        for width in (1, 6, 15):
            session._set_anchor(anchor)
            proposals, confidence = weighed(session, width)
            for p_min in (0.01, *(confidence[:width:3] + 1e-6), 1.0):
                below = [i for i in range(width) if confidence[i] < p_min]
                kept = below[0] if below else width
                before = session.statistics.drafted
                length = len(session.tokens)
                after = session.round(anchor, width, p_min=p_min)
                assert session.statistics.drafted - before == kept
                assert read(session, "tokens", "int32")[1 : kept + 1].tolist() == proposals[:kept]
                fresh.rewind(0)
                fresh.prefill(session.tokens[:length], "ids")
                assert fresh.round(anchor, kept)[:1] == after[:1]
                assert len(after) <= kept + 1
                session.rewind(length)


@pytest.mark.parametrize("name", PYCODE)
def test_confidence_of_the_reference(name: str, workshop: Workshop) -> None:
    """Off by what activations in int8 make of it; weighing proposes what proposing does."""
    options, session = workshop.options(name), workshop.session(name)
    assert options.drafter is not None
    model = ReferenceModel(*read_model(options.model), F16, int8_activations)
    reference = ReferenceDrafter(*read_drafter(options.drafter), model, F16, int8_activations)
    reference.inject(reference.features(model.forward(PROMPT, 0)), 0)
    (anchor,) = afresh(session, PROMPT, 1)
    for width in (1, 7, 15):
        session._set_anchor(anchor)
        proposals, confidence = weighed(session, width)
        session._set_anchor(anchor)
        run(session, *draft_programs(width, 0))
        assert read(session, "tokens", "int32")[1 : width + 1].tolist() == proposals
        expected, shares = reference.propose_and_weigh(anchor, width)
        assert proposals == expected
        np.testing.assert_allclose(confidence[:width], shares, atol=0.02)


@pytest.mark.parametrize("head", ["ids", "draw"])
@pytest.mark.parametrize("name", [*PYCODE, "pycode-v1-whole"])
def test_a_round_that_is_cut_is_two_waits_and_two_short_reads(name: str, head: str, workshop: Workshop) -> None:
    session = workshop.session(name)
    (anchor,) = afresh(session, PROMPT, 1, 0, SAMPLED)
    anchor = session.round(anchor, 0, head, 0.5)[-1]
    for width in (15, 4, 0, *MIXED):
        with traffic(session) as seen:
            anchor = session.round(anchor, width, head, 0.5)[-1]
        assert (seen.uploaded, seen.synchronisations) == (0, 2 if width else 1)
        assert 0 < seen.downloaded <= 256


def test_rejection_is_the_rule_where_the_drafter_gives_probabilities(workshop: Workshop) -> None:
    rules = {}
    for name in PYCODE:
        session = workshop.session(name)
        for asked, parameters in (("auto", SAMPLED), ("match", SAMPLED), ("auto", ON_HOST),
                                  ("auto", replace(SAMPLED, temperature=0.0))):
            afresh(session, PROMPT, 20, 4, parameters, DraftParameters(asked))
            rules.setdefault(name, []).append(session.statistics.rule)
    assert rules == {"pycode-v1": ["match", "match", "match", ""], "pycode-v2": ["reject", "match", "match", ""]}


def test_a_rule_that_cannot_be_is_said_once(workshop: Workshop) -> None:
    session = workshop.session("pycode-v1")
    for _ in range(2):
        afresh(session, PROMPT, 4, 2, SAMPLED, REJECT)
    assert session.notes == ["proposals are accepted by matching: this drafter gives them no probabilities"]
    session = workshop.session("pycode-v2")
    for _ in range(2):
        afresh(session, PROMPT, 4, 2, ON_HOST)
    (note,) = session.notes
    assert note.startswith("tokens are drawn on the host")
    assert note.endswith("; proposals are accepted by matching")


def test_a_seed_decides_the_text_of_a_width(workshop: Workshop) -> None:
    """Without drafts it is that of plain decoding, with drafts another; each comes again."""
    session, alone = workshop.session("pycode-v2"), workshop.session("pycode")
    plain = afresh(alone, PROMPT, 60, 0, SAMPLED)
    assert afresh(session, PROMPT, 60, 0, SAMPLED) == plain
    texts = [afresh(session, PROMPT, 60, width, SAMPLED) for width in (5, 15, None)]
    assert [afresh(workshop.session("pycode-v2"), PROMPT, 60, width, SAMPLED) for width in (5, 15, None)] == texts
    assert plain not in texts
    assert session.statistics.accepted > 0


def test_a_greedy_round_proposes_greedily_whatever_was_before(workshop: Workshop) -> None:
    session, fresh = workshop.session("pycode-v2"), workshop.session("pycode-v2")
    hot = replace(SAMPLED, temperature=50.0)
    generate(session, PROMPT, 30, 6, hot)
    for drafted in (lambda s: afresh(s, PROMPT, 40, 7), lambda s: afresh(s, PROMPT, 40, 7, ON_HOST),
                    lambda s: afresh(s, PROMPT, 40, 7, SAMPLED, MATCH)):
        generate(session, PROMPT, 30, 6, hot)
        assert drafted(session) == drafted(fresh)
        assert session.statistics.reached == fresh.statistics.reached
    generate(session, PROMPT, 30, 6, hot)
    (anchor,) = afresh(session, PROMPT, 1, 0, hot)
    fresh.rewind(0)
    fresh.prefill(PROMPT, "ids")
    assert session.round(anchor, 15) == fresh.round(anchor, 15)
    assert same_committed(session, fresh)
