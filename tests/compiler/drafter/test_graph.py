"""The drafter's graph, interpreted as written and after all passes, against the reference drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import tvm

from dflashc.compiler.pair import Overrides
from tests.compiler.drafter.pairs import PREFIX, BuiltPair, InterpretedPair, write_pair
from tests.compiler.models.tiny import random
from tests.compiler.pair_files import HIDDEN, TAPS, VOCABULARY, Content, drafter, target
from tests.reference.dflash import speculate
from tests.reference.functions import rms_norm

CONTEXT, ROWS, ANCHOR = 50, (2, 5, 8), 7


def tensors(**shapes: tuple[int, ...]) -> dict[str, np.ndarray | None]:
    return {name: random(name, *shape) for name, shape in shapes.items()}


def biases() -> dict[str, np.ndarray | None]:
    shapes = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}
    return tensors(**{f"blk.{n}.{name}.bias": (rows,) for n in range(2) for name, rows in shapes.items()})


def wide_convolution() -> Content:
    """Three taps, groups of 8 channels."""
    names = [f"blk.{n}.{part}_conv" for n in range(2) for part in ("attn", "ffn")]
    shapes = {f"{name}_base": (2, 3, HIDDEN) for name in names} | {
        f"{name}_proj.weight": (2 * 3 * HIDDEN // 8, HIDDEN) for name in names}
    keys = {"dflash.conv_kernel_size": 3, "dflash.conv_group_size": 8}
    return drafter(2).with_keys(keys).with_tensors(tensors(**shapes))


def reduced(rows: int = 100) -> dict[str, np.ndarray | None]:
    """A head for some of the target's tokens."""
    ids = np.random.default_rng(5).permutation(VOCABULARY)[:rows]
    return tensors(**{"output.weight": (rows, HIDDEN)}) | {"d2t": ids}


EMBEDDING, HEAD = {"token_embd.weight": (VOCABULARY, HIDDEN)}, {"output.weight": (VOCABULARY, HIDDEN)}
TARGET = target()
PAIRS: Mapping[str, tuple[Content, Content, Overrides | None]] = {
    "version 1": (TARGET, drafter(window=0), None),
    "version 1, window as trained": (TARGET, drafter(), None),
    "version 1, window, no row causal": (TARGET, drafter(), Overrides(draft_causal="none")),
    "version 1, window, all causal": (TARGET, drafter(), Overrides(draft_causal="all")),
    "version 1, no window, all causal": (TARGET, drafter(window=0), Overrides(draft_causal="all")),
    "version 2": (TARGET, drafter(2, 0), None),
    "version 2, window": (TARGET, drafter(2), None),
    "version 2, window, causal": (TARGET, drafter(2), Overrides(draft_causal="swa")),
    "version 2, wide convolution": (TARGET, wide_convolution(), None),
    "version 2, scaled and capped logits": (
        TARGET, drafter(2).with_keys({"dflash.logit_scale": 3.0, "dflash.final_logit_softcapping": 2.0}), None),
    "own embedding and head": (TARGET, drafter().with_tensors(tensors(**EMBEDDING, **HEAD)), None),
    "own embedding": (TARGET, drafter().with_tensors(tensors(**EMBEDDING)), None),
    "own head": (TARGET, drafter(2).with_tensors(tensors(**HEAD)), None),
    "head of an untied target": (TARGET.with_tensors(tensors(**HEAD)), drafter(2), None),
    "target with scaled embedding": (target("gemma3"), drafter(), None),
    "scale in the file": (target("gemma3"), drafter().with_keys({"dflash.embedding_scale": 3.0}), None),
    "half of a head rotated": (TARGET, drafter().with_keys({"dflash.rope.dimension_count": 8}), None),
    "another rotary base for the context": (
        TARGET, drafter().with_keys({"dflash.dflash.backbone_rotary_base": 1e4}), None),
    "biases": (TARGET, drafter().with_tensors(biases()), None),
    "reduced vocabulary": (TARGET, drafter().with_tensors(reduced()), None),
    "version 2, reduced vocabulary": (TARGET, drafter(2).with_tensors(reduced()), None),
    "sinks": (TARGET, drafter(2).with_tensors(
        {f"blk.{n}.attn_sinks.weight": random(f"{n}.sinks", 4) for n in range(2)}), None),
}
MODULES: Mapping[str, Callable[[BuiltPair], tvm.IRModule]] = {
    "graph": lambda built: built.graph, "optimised": lambda built: built.optimised}


@pytest.fixture(scope="module", params=PAIRS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltPair:
    target_file, drafter_file, overrides = PAIRS[request.param]
    folder = tmp_path_factory.mktemp("pair")
    paths = target_file.write(folder / "target.gguf"), drafter_file.write(folder / "drafter.gguf")
    return BuiltPair(paths, overrides)


@pytest.fixture
def simple(tmp_path: Path) -> BuiltPair:
    return BuiltPair((TARGET.write(tmp_path / "target.gguf"), drafter().write(tmp_path / "drafter.gguf")))


def features(count: int = CONTEXT) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, len(TAPS) * HIDDEN))


def final_norm(built: BuiltPair, residual: np.ndarray) -> np.ndarray:
    return rms_norm(residual, built.weights[f"{PREFIX}output_norm.weight"].values, built.config.epsilon)


def assert_close(actual: np.ndarray, expected: np.ndarray, dtype: type[np.floating]) -> None:
    assert np.abs(actual - expected).max() < (1e-4 if dtype is np.float32 else 1e-10) * np.abs(expected).max()


def injected(built: BuiltPair, module: tvm.IRModule, dtype: type[np.floating] = np.float64) -> InterpretedPair:
    ours = InterpretedPair(built, module, dtype)
    ours.inject(features(), 0)
    return ours


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("module", MODULES)
def test_block_and_proposals_are_those_of_the_reference(
    built: BuiltPair, module: str, dtype: type[np.floating]
) -> None:
    ours = injected(built, MODULES[module](built), dtype)
    _, reference = built.references()
    reference.inject(features(), 0)
    for rows in ROWS:
        assert_close(final_norm(built, ours.block(ANCHOR, rows)), reference.block_hidden(ANCHOR, rows), dtype)
        proposals, confidence = reference.propose_and_weigh(ANCHOR, rows - 1)
        assert ours.propose(ANCHOR, rows - 1) == proposals
        weighed, ours_confidence = ours.weigh(ANCHOR, rows - 1)
        assert weighed == proposals
        assert_close(ours_confidence, np.array(confidence), dtype)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("version", [1, 2])
def test_injection_in_any_chunks(version: int, module: str, tmp_path: Path) -> None:
    paths = TARGET.write(tmp_path / "target.gguf"), drafter(version).write(tmp_path / "drafter.gguf")
    built = BuiltPair(paths)
    whole = injected(built, MODULES[module](built))
    ours = InterpretedPair(built, MODULES[module](built))
    ours.inject(features()[:20], 0)
    ours.block(ANCHOR, 8)
    ours.inject(features()[10:15] + 1, 20)  # rejected: written over
    ours.inject(features()[20:21], 20)
    ours.block(ANCHOR, 5)
    ours.inject(features()[21:], 21)
    for name, cache in ours.caches.items():
        assert_close(cache, whole.caches[name], np.float64)
    assert_close(ours.block(ANCHOR, 8), whole.block(ANCHOR, 8), np.float64)


def test_a_block_leaves_no_trace(built: BuiltPair) -> None:
    ours = injected(built, built.graph)
    first = ours.block(ANCHOR, 8)
    ours.block(ANCHOR + 1, 5)
    np.testing.assert_array_equal(ours.block(ANCHOR, 8), first)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("module", MODULES)
def test_speculation_emits_what_the_reference_emits(version: int, module: str, tmp_path: Path) -> None:
    """Draft, verify, accept and inject in rounds, over a pair that agrees on most tokens."""
    built = BuiltPair(write_pair(tmp_path, version=version, copying=True))
    ours = InterpretedPair(built, MODULES[module](built))
    prompt, count, width = [5, 9, 5, 30, 5], 20, 5
    expected = speculate(*built.references(), prompt, count, width)
    assert sum(expected.accepted) > 5
    rows, best = ours.verify(prompt, 0)
    ours.inject(rows, 0)
    tokens, accepted = [int(best[-1])], []
    while len(tokens) < count:
        proposals = ours.propose(tokens[-1], room) if (room := min(width, count - len(tokens) - 1)) else []
        start = ours.committed
        rows, best = ours.verify([tokens[-1], *proposals], start)
        agreed = next((i for i, d in enumerate(proposals) if d != best[i]), len(proposals))
        ours.inject(rows, start)  # the rejected too: nothing reads them before they are written over
        ours.committed = start + agreed + 1
        tokens += best[: agreed + 1].tolist()
        accepted.append(agreed)
    assert (tokens, accepted) == (expected.tokens, expected.accepted)


def test_parameters_do_not_meet_those_of_the_target(simple: BuiltPair) -> None:
    names = {f: {p.name for p in simple.graph[f].params} for f in ("inject", "draft", "propose")}
    assert {n for n in names["inject"] if not n.startswith(PREFIX)} == {
        "features", "tokens", "state", "rope.drafter.frequencies"}
    assert {n for n in names["draft"] if not n.startswith(PREFIX)} == {
        "block", "state", "rope.drafter.frequencies", "token_embd.weight"}
    assert {n for n in names["propose"] if not n.startswith(PREFIX)} == {"hidden", "token_embd.weight"}
