"""Pairs of every kind that the compiler takes: targets, tables of a drafter, mixed formats, large vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflashc.recipes.drafter import DrafterShape, drafter_body, drafter_tensors, write_drafter_of
from dflashc.recipes.target import TargetShape, write_target
from dflashc.recipes.tensors import Formats, Tensor
from tests.rounds.building import Workshop
from tests.rounds.files import Files
from tests.rounds.inside import same_committed
from tests.rounds.reference import check_blocks
from tests.rounds.running import afresh, generate

pytestmark = pytest.mark.slow

TARGET = TargetShape("qwen3", 4, 128, 4, 2, 64, 128, 300, context_length=4096)
K_QUANTS = {"attn_v": "Q6_K"}
CODEBOOKS = dict.fromkeys(("selector_predecessor", "selector_successor", "selector_hidden"), "F16")
KINDS = ("gemma3", "llama", "k-quants", "tied", "own", "large")


def make(folder: Path, name: str, shape: TargetShape, formats: tuple[Formats, Formats], tables: tuple[str, ...] = (),
         layers: int = 2, heads: tuple[int, int] = (4, 2), taps: tuple[int, ...] = (0, 1), block_size: int = 16,
         sliding_window: int = 0, version: int = 1, selector_candidates: int = 8) -> dict[str, Files]:
    """A random target and a random drafter, with embedding or head of its own where `tables` names them."""
    model, drafter = folder / f"{name}-target.gguf", folder / f"{name}-drafter.gguf"
    write_target(model, shape, formats[0])
    body = replace(drafter_body(model, layers), heads=heads[0], kv_heads=heads[1])
    drafter_shape = DrafterShape(body, taps, block_size, sliding_window, version,
                                 selector_candidates=selector_candidates)
    own = [Tensor(table, (shape.vocabulary, shape.hidden), shape.hidden**-0.5) for table in tables]
    write_drafter_of(drafter, model, drafter_shape, [*own, *drafter_tensors(drafter_shape)], formats[1], seed=1)
    return {f"{name}-alone": Files(model), name: Files(model, drafter)}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder, f16 = tmp_path_factory.mktemp("kinds"), (Formats("F16"), Formats("F16"))
    k_quants = Formats("Q4_K", {**K_QUANTS, "token_embd": "Q6_K"}), Formats("Q4_K", {**K_QUANTS, **CODEBOOKS})
    gemma3 = replace(TARGET, architecture="gemma3", layers=6, sliding_window=16)
    llama = replace(TARGET, architecture="llama", tied=False, rope_scaling=8.0)
    qwen2 = replace(TARGET, architecture="qwen2", hidden=256, feed_forward=512)
    files = {
        **make(folder, "gemma3", gemma3, f16, version=2, block_size=8, sliding_window=24),
        **make(folder, "llama", llama, f16, block_size=32, taps=(2, 0, 1)),
        **make(folder, "k-quants", qwen2, k_quants, version=2),
        **make(folder, "tied", TARGET, f16, ("token_embd.weight",), layers=1, heads=(8, 4)),
        **make(folder, "own", TARGET, f16, ("token_embd.weight", "output.weight"), layers=3, heads=(6, 2), version=2,
               sliding_window=20),
        **make(folder, "large", replace(TARGET, vocabulary=40000), f16, version=2, selector_candidates=16),
    }
    with closing(Workshop(files, folder)) as workshop:
        yield workshop


@pytest.mark.parametrize("name", KINDS)
def test_greedy_text_is_that_of_the_target_alone(name: str, workshop: Workshop) -> None:
    session, alone = workshop.session(name), workshop.session(f"{name}-alone")
    assert session.most_width == (7 if name == "gemma3" else 15)
    text = np.random.default_rng(1).integers(0, session.vocabulary, 70).tolist()
    for prompt in (text[:3], text):
        expected = afresh(alone, prompt, 24)
        for width in (*range(session.most_width + 1), None):
            assert afresh(session, prompt, 24, width) == expected, width


@pytest.mark.parametrize("name", KINDS)
def test_rounds_leave_the_bits_of_plain_decoding(name: str, workshop: Workshop) -> None:
    session, fresh = workshop.session(name), workshop.session(name)
    generate(session, np.random.default_rng(2).integers(0, session.vocabulary, 30).tolist(), 30)
    for token in session.tokens:
        fresh.decode([token], None)
    assert same_committed(session, fresh)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_the_reference(name: str, workshop: Workshop) -> None:
    """Equal but for activations that round otherwise to int8, which K-quants take."""
    check_blocks(workshop, name, 0.05 if name == "k-quants" else 1e-3)
