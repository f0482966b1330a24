"""What is in the caches depends on the committed tokens alone: not on chunks, rounds, or what was rejected."""

from __future__ import annotations

import numpy as np
import pytest

from dflashc.recipes.counting import PERIOD
from dflashc.runtime.session import Session
from tests.rounds.building import Workshop
from tests.rounds.files import counted
from tests.rounds.inside import block, same_committed
from tests.rounds.running import MIXED, WIDTHS, generate

TEXT = np.random.default_rng(5).integers(0, 300, 333).tolist()
CHUNKINGS = ([333 % 16, *[16] * 20], [256, 64, 13], [1, 64, 3, 256, 9], [64] * 5 + [2] * 6 + [1])
PAIRS = ["pycode-v1", "pycode-v2", "pycode-v2-q8", "windowed-v1", "windowed-v1-q8", "windowed-v2", "d5", "reduced"]


def commit(session: Session, tokens: list[int], chunks: list[int]) -> Session:
    """Run the target over tokens, in chunks."""
    assert sum(chunks) == len(tokens)
    for count in chunks:
        session.decode(tokens[len(session.tokens) :][:count], None)
    return session


def one_by_one(session: Session, tokens: list[int]) -> Session:
    return commit(session, tokens, [1] * len(tokens))


@pytest.mark.parametrize("name", PAIRS)
def test_chunks_leave_the_same_bits(name: str, workshop: Workshop) -> None:
    expected = one_by_one(workshop.session(name), TEXT)
    for chunks in CHUNKINGS:
        assert same_committed(commit(workshop.session(name), TEXT, chunks), expected)


@pytest.mark.parametrize("name", [*PAIRS, "pycode-v1-whole", "oracle-v2"])
def test_rounds_leave_the_bits_of_plain_decoding(name: str, workshop: Workshop) -> None:
    """Whatever was rejected in between; and the next block is that of a session that only ever saw these tokens."""
    prompt = counted(30, 20) if name.startswith("oracle") else TEXT[:50]
    session, fresh = workshop.session(name), workshop.session(name)
    for turn in range(3):
        generate(session, prompt if turn == 0 else [*session.tokens, turn], 30)
    assert session.statistics.drafted > session.statistics.accepted or name.startswith("oracle")
    one_by_one(fresh, session.tokens)
    assert same_committed(session, fresh)
    for width in (1, 6, 15):
        assert block(session, 7, width) == block(fresh, 7, width)


def test_every_number_of_rejected_rows_leaves_the_same_bits(workshop: Workshop) -> None:
    session, fresh = workshop.session("oracle-v1"), workshop.session("oracle-v1")
    circle = counted(30, 64)
    for width in WIDTHS:
        for kept in range(width + 1):
            prompt = circle[:24]
            if kept < width:
                prompt[25 + kept - (PERIOD + 1)] = 200
            for s in (session, fresh):
                s.rewind(0)
                s.prefill(prompt, "ids")
            session.round(circle[24], width)
            for token in circle[24 : 25 + kept]:
                fresh.decode([token], None)
            assert same_committed(session, fresh), (width, kept)


@pytest.mark.parametrize("name", PAIRS)
def test_a_block_leaves_nothing_behind(name: str, workshop: Workshop) -> None:
    """Its result is a function of anchor, committed tokens and rows: not of blocks before it."""
    session = commit(workshop.session(name), TEXT[:77], [64, 13])
    fresh = commit(workshop.session(name), TEXT[:77], [64, 13])
    first = block(session, 9, 7)
    for anchor, width in ((8, 15), (250, 1), (0, 7)):
        assert block(session, anchor, width) != first
    assert block(session, 9, 7) == first == block(fresh, 9, 7)
    assert same_committed(session, fresh)


@pytest.mark.parametrize("width", [0, 3, 15])
@pytest.mark.parametrize("name", ["pycode-v1", "pycode-v2", "pycode-v2-q8"])
def test_a_shared_prefix_is_reused(name: str, width: int, workshop: Workshop) -> None:
    """Another prompt that begins alike, a longer one, a shorter one, the same again: all as in a fresh session."""
    session = workshop.session(name)
    first = TEXT[:100]
    answer = generate(session, first, 20, width)
    held = len(session.tokens)
    assert held >= len(first) + len(answer) - 1
    for prompt, cached in (([*first, *answer[:10], 5, 6], 110), ([*TEXT[:60], 3], 60), ([*TEXT[:60], 3], 60),
                           (TEXT[:30], 29), (TEXT[1:40], 0)):
        fresh = workshop.session(name)
        assert generate(session, prompt, 20, width) == generate(fresh, prompt, 20, width)
        assert session.statistics.cached == cached
        assert same_committed(session, fresh)


def test_a_conversation_goes_on_like_a_fresh_one(workshop: Workshop) -> None:
    session, history, held = workshop.session("pycode-v2"), TEXT[:10], 0
    for turn, width in enumerate((*MIXED, None)):
        history = [*history, *TEXT[turn * 3 : turn * 3 + 5]]
        fresh = workshop.session("pycode-v2")
        answer = generate(session, history, 25, width)
        assert answer == generate(fresh, history, 25, width)
        assert session.statistics.cached == held
        history, held = [*history, *answer], len(session.tokens)
        assert same_committed(session, fresh)
