"""Where a text ends in the middle of a round: stop tokens, budgets, a full context, a reader who leaves."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from dflashc.runtime.errors import RequestError
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from dflashc.runtime.width import FixedWidth
from tests.proof.running import GREEDY
from tests.rounds.building import Workshop
from tests.rounds.files import counted
from tests.rounds.inside import same_committed
from tests.rounds.running import WIDTHS, afresh, generate

CIRCLE = counted(30, 200)
PROMPT = CIRCLE[:20]


def check_clipped(session: Session, prompt: list[int], answer: list[int]) -> None:
    """The session holds what was said; at most the last token, which nothing has followed yet, is missing."""
    said = [*prompt, *answer]
    assert session.tokens in (said, said[:-1])


def check_next_turn(session: Session, fresh: Session, prompt: list[int], width: int) -> None:
    """The session goes on like one that never heard of what it dropped."""
    fresh.rewind(0)
    assert generate(session, prompt, 20, width) == generate(fresh, prompt, 20, width)
    assert same_committed(session, fresh)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["oracle-v1", "oracle-v2"])
def test_nothing_after_a_stop_token(name: str, width: int, workshop: Workshop) -> None:
    """A whole block is accepted, and the stop token is each of its tokens in turn."""
    session, fresh = workshop.session(name), workshop.session(name)
    for place in range(15):
        stop = CIRCLE[20 + place]
        session.rewind(0)
        answer = generate(session, PROMPT, 100, width, stop=frozenset([stop]))
        assert answer == CIRCLE[20 : 20 + place]
        assert session.statistics.generated == place
        check_clipped(session, PROMPT, answer)
        check_next_turn(session, fresh, [*PROMPT, *answer, stop, 77, *CIRCLE[:20]], width)


@pytest.mark.parametrize("width", [0, 1, 7, 15])
@pytest.mark.parametrize("name", ["oracle-v1", "pycode-v2"])
def test_a_budget_ends_in_the_middle_of_a_round(name: str, width: int, workshop: Workshop) -> None:
    session, fresh = workshop.session(name), workshop.session(name)
    whole = afresh(session, PROMPT, 40, width)
    for limit in (*range(4), *range(14, 20), 33, 34):
        answer = afresh(session, PROMPT, limit, width)
        assert answer == whole[:limit]
        statistics = session.statistics
        assert statistics.generated == limit
        assert statistics.rounds + statistics.accepted == max(0, limit - 1)  # nothing was verified in vain
        check_clipped(session, PROMPT, answer)
        check_next_turn(session, fresh, [*PROMPT, *answer, 77, *CIRCLE[:20]], width)


@pytest.mark.parametrize("width", [0, 1, 7, 15])
@pytest.mark.parametrize("name", ["oracle-v1", "pycode-v2", "pycode-v2-whole"])
@pytest.mark.parametrize("room", [0, 1, 2, 15, 16, 17, 40])
def test_a_context_fills_up_in_the_middle_of_a_round(name: str, width: int, room: int, workshop: Workshop) -> None:
    """As many tokens as fit, and one that needs no place, as with the larger context."""
    wide, narrow = workshop.session(name), workshop.session(name, context=256)
    prompt = counted(30, 256 - room)
    answer = generate(narrow, prompt, 100, width)
    assert answer == generate(wide, prompt, room + 1, width)
    assert narrow.tokens == [*prompt, *answer[:-1]]
    assert len(narrow.tokens) == 256
    with pytest.raises(RequestError, match="the context is full: 256 tokens"):
        narrow.round(answer[-1], width)
    assert generate(narrow, prompt[:-60], 9, width) == generate(wide, prompt[:-60], 9, width)


@pytest.mark.parametrize("name", ["oracle-v1", "pycode-v1"])
@pytest.mark.parametrize("parameters", [GREEDY, replace(GREEDY, temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_a_reader_who_leaves(name: str, parameters: SamplingParameters, workshop: Workshop) -> None:
    session, fresh = workshop.session(name), workshop.session(name)
    for count in range(1, 34, 2):
        session.rewind(0)
        stream = session.generate(PROMPT, parameters, 100, width=FixedWidth(15))
        answer = list(islice(stream, count))
        del stream  # which closes it
        check_clipped(session, PROMPT, answer)
        check_next_turn(session, fresh, [*PROMPT, *answer, *CIRCLE[:20]], 15)


def test_special_tokens_of_a_block_are_no_stop(workshop: Workshop) -> None:
    """The masks that fill a block are input, not text: a stop token that is the mask ends nothing."""
    session = workshop.session("oracle-v1")
    mask = session._device.download(session._memories["block"], "int32", 2)[1]
    stop = frozenset([int(mask)])
    assert generate(session, PROMPT, 60, 15, stop=stop) == CIRCLE[20:80]
    assert np.array_equal(session._device.download(session._memories["block"], "int32", 16)[1:], [mask] * 15)
