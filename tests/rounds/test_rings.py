"""Caches of windowed layers as rings, far beyond their windows: as if all had been kept, whatever is rewound.

WINDOW is 24 in the drafters and 16 in the target here, so all rings hold 512 tokens, of contexts of 1,024.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from dflashc.compiler.lower import caches, programs
from dflashc.recipes.drafter import DrafterShape, drafter_body, write_drafter
from dflashc.recipes.target import TargetShape, write_target
from dflashc.recipes.tensors import Formats
from dflashc.runtime.session import Session
from tests.proof.running import logits_along, same_bits
from tests.rounds.building import Workshop
from tests.rounds.files import WINDOW, Files
from tests.rounds.inside import block, cache_buffers, same_committed
from tests.rounds.running import afresh, generate

TEXT = np.random.default_rng(8).integers(0, 300, 1000).tolist()
DRAFTERS = ["windowed-v1", "windowed-v1-q8", "windowed-v2", "d5"]
"""All layers windowed, or one of two; behind a target that keeps all."""
PAIRS = ["sliding", "sliding-q8"]
"""A target and a drafter, both with windowed layers and one that sees all."""
WIDTHS = (3, 0, 1, 2)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """The pairs of `PAIRS`, and the same with caches of the whole context as "kept-…"; up to 4 rows, and prefill."""
    folder = tmp_path_factory.mktemp("rings")
    target, drafter = folder / "target.gguf", folder / "drafter.gguf"
    write_target(target, TargetShape("gemma3", 6, 128, 4, 2, 64, 128, 300, context_length=4096, sliding_window=16),
                 Formats("F16"))
    write_drafter(drafter, target, DrafterShape(drafter_body(target), (0, 4), block_size=4, sliding_window=WINDOW),
                  Formats("F16"))
    pair = Files(target, drafter)
    pairs = {"sliding": pair, "sliding-q8": replace(pair, kv_types=("q8_0", "q8_0"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "VERIFY_ROWS", (1, 2, 3, 4))
        workshop = Workshop(pairs | {f"kept-{name}": files for name, files in pairs.items()}, folder)
        for name in pairs:
            workshop.artefact(name)
        patch.setattr(caches, "ring_slots", lambda *_: 0)
        for name in pairs:
            workshop.artefact(f"kept-{name}")
    with closing(workshop):
        yield workshop


def rings_of(session: Session) -> list[int]:
    return [session._plan.buffers[name].slots for name in cache_buffers(session)]


@pytest.mark.parametrize("name", PAIRS)
def test_a_ring_gives_the_bits_of_a_cache_that_keeps_all(name: str, sliding: Workshop) -> None:
    """Token by token, in rows, in chunks that wrap around anywhere; and so do rounds."""
    session, kept = sliding.session(name), sliding.session(f"kept-{name}")
    assert sorted(rings_of(session)) == [0] * 4 + [512] * 12
    assert rings_of(kept) == [0] * 16
    expected = logits_along(kept, TEXT, rows=1)
    for rows in (1, 3, 4):
        assert same_bits(logits_along(session, TEXT, rows), expected)
    for length in (513, 700, 1000):
        session.rewind(0)
        session.prefill(TEXT[:length], "logits")
        assert same_bits(session.logits(1)[0], expected[length - 1])
    for width in (*WIDTHS, None):
        assert afresh(session, TEXT[:900], 60, width) == afresh(kept, TEXT[:900], 60, width)
        assert session.statistics.accepted == kept.statistics.accepted


@pytest.mark.parametrize("name", DRAFTERS)
def test_blocks_far_beyond_the_window(name: str, workshop: Workshop) -> None:
    """After rounds that rejected most, the next block is that of a session that only ever saw these tokens."""
    session, fresh = workshop.session(name), workshop.session(name)
    assert 512 in rings_of(session)
    for length in (500, 700, 930):
        generate(session, TEXT[:length], 40)
        fresh.rewind(0)
        for token in session.tokens:
            fresh.decode([token], None)
        assert same_committed(session, fresh)
        for width in (1, 6, 15):
            assert block(session, 7, width) == block(fresh, 7, width)


def check_like_fresh(session: Session, fresh: Session, prompt: list[int], cached: int, width: int) -> None:
    fresh.rewind(0)
    assert generate(session, prompt, 20, width) == generate(fresh, prompt, 20, width)
    assert session.statistics.cached == cached
    assert same_committed(session, fresh)
    assert block(session, 7, 3) == block(fresh, 7, 3)


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_a_prefix_that_the_target_has_lost_is_run_again(name: str, width: int, sliding: Workshop) -> None:
    """The keys of a windowed layer of the target are made from windows below, so from the first token on."""
    session, fresh = sliding.session(name), sliding.session(name)
    generate(session, TEXT[:900], 20, width)
    for prompt, cached in (([*TEXT[:800], 5, 6], 800), ([*TEXT[:300], 5, 6], 0), ([*TEXT[:300], 5, 7, 8], 301),
                           (TEXT[:700], 300), (TEXT[:460], 459), (TEXT[:100], 0)):
        check_like_fresh(session, fresh, prompt, cached, width)


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_the_drafter_has_lost_is_run_again(name: str, workshop: Workshop) -> None:
    """Just the window before the new text, and nothing where the new text is as long; the target keeps all."""
    session, fresh = workshop.session(name), workshop.session(name)
    for prompt, cached in ((TEXT[:900], 0), ([*TEXT[:800], 5, 6], 800), ([*TEXT[:300], *[5] * 10], 310 - (WINDOW - 1)),
                           ([*TEXT[:300], *[5] * 10, 6], 310)):
        check_like_fresh(session, fresh, prompt, cached, 3)
    generate(session, TEXT[:900], 20, 3)
    check_like_fresh(session, fresh, [*TEXT[:200], *[9] * 40], 200, 3)


@pytest.mark.parametrize("length", [880, 500, 300, 10])
@pytest.mark.parametrize("name", ["sliding", "windowed-v1"])
def test_a_round_after_a_rewind_sees_its_window(name: str, length: int, sliding: Workshop, workshop: Workshop) -> None:
    """Whatever the rings have lost, and whoever asks: a plain step, a draft, a part of a prompt."""
    shop = sliding if name in PAIRS else workshop
    session, fresh = shop.session(name), shop.session(name)
    fresh.prefill(TEXT[:length], "ids")
    expected = [fresh.round(7, 3)]
    fresh.rewind(length)
    expected.append(fresh.round(7, 0))
    for width, after in zip((3, 0), expected, strict=True):
        session.rewind(0)
        session.prefill(TEXT[:900], "ids")
        session.rewind(length)
        assert session.round(7, width) == after
    session.rewind(0)
    session.prefill(TEXT[:900], "ids")
    session.rewind(length)
    session.decode(TEXT[length : length + 4], "logits", 0, 4)
    fresh.rewind(length)
    fresh.decode(TEXT[length : length + 4], "logits", 0, 4)
    assert same_bits(session.logits(4), fresh.logits(4))


def test_a_rehearsal_leaves_rings_that_work(sliding: Workshop) -> None:
    session, fresh = sliding.session("sliding"), sliding.session("sliding")
    session.rehearse(900)
    assert session.time(3, "draft", "decode") > 0
    session.rewind(0)
    assert generate(session, TEXT[:600], 20, 3) == generate(fresh, TEXT[:600], 20, 3)
