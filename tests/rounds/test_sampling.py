"""Sampling inside the programs: the host's text, the host's law, and as little traffic as a greedy round."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dflashc.runtime.drafting import DraftParameters
from dflashc.runtime.sampling import SamplingParameters, probabilities
from dflashc.runtime.session import Session
from dflashc.runtime.width import FixedWidth
from tests.proof.comparing import recorded
from tests.proof.running import logits_along
from tests.rounds.building import Workshop
from tests.rounds.inside import traffic
from tests.rounds.running import MATCH, REJECT, afresh, generate

PAIRS = ["pycode-v1", "pycode-v2"]
PROMPT = recorded("golden-pycode-3m-q8_0")["greedy"][0]["prompt_ids"]
SAMPLERS = {
    "default": SamplingParameters(seed=1),
    "64 candidates": SamplingParameters(temperature=1.4, top_k=64, top_p=1.0, min_p=0.0, seed=2),
    "penalties": SamplingParameters(repeat_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.2, seed=3),
    "penalties of the whole text": SamplingParameters(temperature=0.0, repeat_penalty=1.3, repeat_last_n=-1),
}


def sampled_by_host(session: Session, parameters: SamplingParameters, count: int, width: int,
                    monkeypatch: pytest.MonkeyPatch) -> list[int]:
    with monkeypatch.context() as patch:
        patch.setattr("dflashc.runtime.session.refusal", lambda *_: "by the host")
        return afresh(session, PROMPT, count, width, parameters, MATCH)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", PAIRS)
def test_host_and_device_draw_the_same_text(name: str, sampler: str, workshop: Workshop,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    session, parameters = workshop.session(name), SAMPLERS[sampler]
    for width in (0, 1, 6, 15):
        expected = sampled_by_host(session, parameters, 60, width, monkeypatch)
        accepted = session.statistics.accepted
        assert afresh(session, PROMPT, 60, width, parameters, MATCH) == expected
        assert session.statistics.accepted == accepted


@pytest.mark.parametrize("name", PAIRS)
def test_the_device_knows_the_text_whoever_wrote_it(name: str, workshop: Workshop,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties look at tokens of the prompt, of greedy rounds, of the host's rounds, and of what was rewound."""
    session, fresh = workshop.session(name), workshop.session(name)
    parameters = SamplingParameters(repeat_penalty=1.3, repeat_last_n=-1, seed=4)
    text = [*PROMPT, *afresh(session, PROMPT, 30, 5)]
    text += generate(session, text, 20, 4, SamplingParameters(top_k=65, seed=5))
    generate(session, text[:-7], 12, 3, parameters)
    expected = generate(fresh, text[:-3], 40, 2, parameters, drafting=MATCH)
    assert generate(session, text[:-3], 40, 6, parameters, drafting=MATCH) == expected


def test_a_sampled_round_moves_as_little_as_a_greedy_one(workshop: Workshop) -> None:
    session = workshop.session("pycode-v2")
    (anchor,) = afresh(session, PROMPT, 1, 0, SAMPLERS["penalties"])
    anchor = session.round(anchor, 0, "draw")[-1]
    for width in (15, 4, 0, 1, 9):
        with traffic(session) as seen:
            anchor = session.round(anchor, width, "draw")[-1]
        assert (seen.uploaded, seen.downloaded, seen.synchronisations) == (0, 4 * (width + 2), 1)


def test_what_the_device_cannot_draw_is_said_once(workshop: Workshop) -> None:
    session = workshop.session("pycode-v1")
    for top_k in (64, 65, 65):
        afresh(session, PROMPT, 4, 2, SamplingParameters(top_k=top_k, seed=1))
    assert session.notes == [
        "tokens are drawn on the host, which is slower: top-k 65 keeps 65 of them, the compiled sampler at most 64"]


@pytest.mark.parametrize(("name", "drafting"), [
    ("pycode-v1", DraftParameters()), ("pycode-v2", MATCH), ("pycode-v2", REJECT),
    ("pycode-v2", DraftParameters(p_min=0.2))], ids=["v1", "match", "reject", "reject and cut"])
def test_pairs_of_tokens_follow_the_law(name: str, drafting: DraftParameters, workshop: Workshop) -> None:
    """The first token of an answer and that of a speculative round behind it, over seeds, by chi-square.

    With 3 tokens each there are 8 degrees of freedom; 26.12 is the 0.999 quantile.
    """
    session = workshop.session(name)
    law = SamplingParameters(temperature=1.5, top_k=3, top_p=1.0, min_p=0.0, seed=0)
    expected = {}
    for text, share in continued(session, PROMPT, law):
        expected |= {pair[-2:]: share * other for pair, other in continued(session, text, law)}
    counts = dict.fromkeys(expected, 0)
    kept = 0
    for seed in range(2000):
        stream = session.generate(PROMPT, replace(law, seed=seed), 8, width=FixedWidth(3), drafting=drafting)
        counts[tuple(itertools.islice(stream, 2))] += 1
        stream.close()
        kept += session.statistics.accepted
    wanted = np.array([expected[pair] for pair in counts]) * 2000
    assert (wanted >= 5).all()
    assert ((np.array(list(counts.values())) - wanted) ** 2 / wanted).sum() < 26.12
    assert kept > 0


def continued(session: Session, text: Sequence[int],
              law: SamplingParameters) -> Iterator[tuple[tuple[int, ...], float]]:
    """A text with each token that may follow, and the probability of that."""
    ids, shares = probabilities(logits_along(session, text)[-1], text, law)
    for token, share in zip(ids.tolist(), shares.tolist(), strict=True):
        yield (*text, token), share
