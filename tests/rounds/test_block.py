"""What the block of a drafter sees: its window, distances alone, and nothing of convolutions that do nothing."""

from __future__ import annotations

import numpy as np
import pytest

from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.session import Session
from tests.reference.config import read_drafter
from tests.rounds.building import Workshop
from tests.rounds.files import WINDOW
from tests.rounds.inside import Block, block, cache_buffers, overwrite, read, run, write
from tests.rounds.reference import check_blocks
from tests.rounds.running import WIDTHS

TEXT = np.random.default_rng(6).integers(0, 300, 200).tolist()
WINDOWED = ["windowed-v1", "windowed-v1-q8", "windowed-v2"]


def after(session: Session, tokens: list[int]) -> Session:
    session.rewind(0)
    session.prefill(tokens, "ids")
    return session


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_convolutions_that_do_nothing_make_version_2_version_1(width: int, workshop: Workshop) -> None:
    """And codebooks of zeros leave each row its arg-max."""
    for length in (1, 20, 130):
        plain = block(after(workshop.session("random"), TEXT[:length]), 9, width)
        assert block(after(workshop.session("identity"), TEXT[:length]), 9, width) == plain
        assert np.ptp(plain.residual) > 0.1


def with_noise(session: Session, positions: slice) -> Block:
    """A block behind 100 tokens, some of which the drafter's caches hold noise for."""
    after(session, TEXT[:100])
    for buffer in (name for name in cache_buffers(session) if name.startswith("drafter.")):
        overwrite(session, buffer, positions, np.random.default_rng(1))
    return block(session, 9, 15)


@pytest.mark.parametrize("name", WINDOWED)
def test_outside_of_the_window_nothing_is_seen(name: str, workshop: Workshop) -> None:
    """Position 100 - d is at distance d from the anchor, and a window of W shows distances below W."""
    session = workshop.session(name)
    clean, first = with_noise(session, slice(0, 0)), 100 - (WINDOW - 1)
    assert with_noise(session, slice(0, first)) == clean
    seen = with_noise(session, slice(first, first + 1)).residual
    assert np.any(seen != clean.residual, axis=1).all()  # row 0 saw it, and the others see row 0 in the second layer


def test_causal_blocks_are_prefixes_of_wider_ones(workshop: Workshop) -> None:
    """Of version 1 layers with a window; version 2 sees the whole block everywhere."""
    for name in WINDOWED:
        session = after(workshop.session(name), TEXT[:50])
        wide = block(session, 9, 15).residual
        for width in (1, 7, 14):
            narrow = block(session, 9, width).residual
            assert np.array_equal(narrow, wide[: width + 1]) is name.startswith("windowed-v1")


@pytest.mark.parametrize("name", ["windowed-v1", "windowed-v2"])
@pytest.mark.parametrize("shift", [1, 37, 512])
def test_only_distances_count(name: str, shift: int, workshop: Workshop) -> None:
    """The same features further on, with nothing of what was before in any window, give the same block."""
    near, far = after(workshop.session(name), TEXT[:64]), workshop.session(name)
    for buffer in (b for b in near._plan.buffers if b.startswith("features.")):
        write(far, buffer, read(near, buffer, "uint8"))
    far.tokens = [0] * shift
    run(far, "positions.64", "inject.64")
    far.tokens += TEXT[:64]
    for width in (1, 15):
        a, b = block(near, 9, width), block(far, 9, width)
        assert np.abs(a.residual - b.residual).max() <= 0.02 * np.abs(a.residual).max()
        if shift == 1:
            assert a.proposals == b.proposals


@pytest.mark.parametrize("name", ["pycode-v1", "pycode-v2"])
def test_whole_blocks_propose_the_first_rows_of_the_widest(name: str, workshop: Workshop) -> None:
    whole, short = after(workshop.session(f"{name}-whole"), TEXT[:50]), after(workshop.session(name), TEXT[:50])
    widest = block(short, 9, 15)
    for width in WIDTHS[1:]:
        narrow = block(whole, 9, width)
        assert narrow.proposals == widest.proposals[:width]
        assert np.array_equal(narrow.residual, widest.residual[: width + 1])


@pytest.mark.parametrize("name", ["d5", "reduced"])
def test_a_reduced_vocabulary_proposes_its_tokens_alone(name: str, workshop: Workshop) -> None:
    """Of the target's numbering: most of them are above the number of the head's rows."""
    drafter = workshop.options(name).drafter
    assert drafter is not None
    tokens = read_drafter(drafter)[1]["d2t"].values
    session = after(workshop.session(name), TEXT[:50])
    proposals = {token for anchor in range(20) for token in block(session, anchor, 15).proposals}
    assert proposals <= set(tokens.tolist())
    assert max(proposals) >= len(tokens)


@pytest.mark.parametrize(("name", "embedding", "head"), [("short", 300, 280), ("padded", 340, 300)])
def test_tables_of_another_size_are_fitted_to_the_target(name: str, embedding: int, head: int,
                                                         workshop: Workshop) -> None:
    """There is a row for whatever the target chooses, and none that it does not know is proposed."""
    rows = {w.name: w.rows for w in load_artefact(workshop.artefact(name)).manifest.weights}
    assert (rows["drafter.token_embd.weight"], rows["drafter.output.weight"]) == (embedding, head)
    session = after(workshop.session(name), TEXT[:50])
    lacking = name == "short"  # whose anchors beyond its rows are all zeros
    assert (block(session, 299, 15) == block(session, 298, 15)) is lacking


@pytest.mark.parametrize("name", ["random", "d5", "short", "padded", *WINDOWED])
def test_blocks_of_the_reference(name: str, workshop: Workshop) -> None:
    """On contexts shorter and longer than the window, within what activations that round otherwise to int8 make."""
    check_blocks(workshop, name, 0.04)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "d5", "windowed-v1", "windowed-v2"])
def test_float32_blocks_of_the_reference(name: str, float32_workshop: Workshop) -> None:
    """Where nothing is rounded to int8."""
    check_blocks(float32_workshop, name, 1e-3)
