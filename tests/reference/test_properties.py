"""What must hold of the references whatever the weights: chunking, windows, positions, degenerate drafters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflashc.recipes.drafter import DrafterShape, drafter_body, write_drafter
from dflashc.recipes.target import PRESETS, write_target
from dflashc.recipes.tensors import Formats
from tests.reference.config import Weight, read_drafter, read_model
from tests.reference.dflash import ReferenceDrafter
from tests.reference.functions import F16, Rope, quantise_activations
from tests.reference.transformer import ReferenceModel, int8_activations

TOKENS = list(np.random.default_rng(0).integers(0, 512, 50))
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def any_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_target(path, PRESETS[f"tiny-{request.param}"], Formats("F32"))
    return path


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair") / "target.gguf"
    write_target(path, PRESETS["tiny-qwen3"], Formats("F32"))
    return path


def drafter(target_path: Path, **changes: int) -> ReferenceDrafter:
    path = target_path.with_name("drafter.gguf")
    write_drafter(path, target_path, DrafterShape(drafter_body(target_path), (0, 2), **changes), Formats("F32"))
    return ReferenceDrafter(*read_drafter(path), ReferenceModel(*read_model(target_path)))


def features(count: int = 50) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, 512))


def test_chunks_and_rollback_change_nothing(any_target: Path) -> None:
    config, weights = read_model(any_target)
    whole = ReferenceModel(config, weights, F16).forward(TOKENS, 0)
    model = ReferenceModel(config, weights, F16)
    model.forward(TOKENS[:30], 0)
    model.forward([1, 2, 3, 4, 5], 30)
    rest = model.forward(TOKENS[30:], 30)
    np.testing.assert_allclose(rest.logits, whole.logits[30:], atol=1e-9)
    np.testing.assert_allclose(rest.taps[2], whole.taps[2][30:], atol=1e-9)


def test_target_window_forgets_all_but_the_last_tokens(any_target: Path) -> None:
    config, weights = read_model(any_target)
    windowed = replace(config, sliding=(True,) * config.layers, sliding_window=3)
    first = ReferenceModel(windowed, weights).forward(TOKENS, 0).logits[-1]
    # A layer sees three tokens, so what the last row is made of reaches back two tokens a layer.
    reach = 1 + 2 * config.layers
    changed = [*np.roll(TOKENS[:-reach], 1), *TOKENS[-reach:]]
    np.testing.assert_allclose(ReferenceModel(windowed, weights).forward(changed, 0).logits[-1], first, atol=1e-9)
    changed[-reach] = (changed[-reach] + 1) % 512
    assert np.abs(ReferenceModel(windowed, weights).forward(changed, 0).logits[-1] - first).max() > 1e-6


def test_gemma_pattern_is_five_sliding_layers_then_a_global_one(tmp_path: Path) -> None:
    write_target(tmp_path / "gemma.gguf", PRESETS["tiny-gemma3"], Formats("F32"))
    config, _ = read_model(tmp_path / "gemma.gguf")
    assert config.sliding == (True, True, True, True, True, False)
    assert [rope.base for rope in config.rope] == [10000.0] * 5 + [1000000.0]
    assert config.embedding_scale == 16.0


def test_injection_in_any_chunks(target_path: Path) -> None:
    whole, chunked = drafter(target_path), drafter(target_path)
    whole.inject(features(), 0)
    chunked.inject(features()[:20], 0)
    chunked.inject(features()[10:15] + 1, 20)
    chunked.inject(features()[20:], 20)
    assert chunked.committed == 50
    np.testing.assert_allclose(chunked.block_hidden(7, 8), whole.block_hidden(7, 8), atol=1e-9)


@pytest.mark.parametrize("version", [1, 2])
def test_block_leaves_no_trace_and_depends_on_distance_only(target_path: Path, version: int) -> None:
    first = drafter(target_path, version=version)
    first.inject(features(), 0)
    hidden = first.block_hidden(7, 8)
    np.testing.assert_array_equal(first.block_hidden(7, 8), hidden)
    shifted = drafter(target_path, version=version)
    shifted.config = replace(shifted.config, sliding=(True, True), sliding_window=40)
    shifted.inject(np.concatenate([features(), features()]), 0)
    again = drafter(target_path, version=version)
    again.config = shifted.config
    again.inject(features(), 0)
    np.testing.assert_allclose(shifted.block_hidden(7, 8), again.block_hidden(7, 8), atol=1e-9)


def test_block_rows_see_each_other_unless_causal(target_path: Path) -> None:
    bidirectional = drafter(target_path)
    bidirectional.inject(features(), 0)
    assert np.abs(bidirectional.block_hidden(7, 4) - bidirectional.block_hidden(7, 8)[:4]).max() > 1e-3
    causal = drafter(target_path)
    causal.config = replace(causal.config, causal_full=True)
    causal.inject(features(), 0)
    np.testing.assert_allclose(causal.block_hidden(7, 4), causal.block_hidden(7, 8)[:4], atol=1e-9)


def test_identity_convolution_is_version_1(target_path: Path) -> None:
    second = drafter(target_path, version=2)
    weights = dict(second.weights)
    for name, weight in weights.items():
        if name.endswith("conv_base"):
            identity = np.zeros_like(weight.values)
            identity[:, 0] = 1
            weights[name] = Weight(identity, weight.format)
        if name.endswith("conv_proj.weight"):
            weights[name] = Weight(np.zeros_like(weight.values), weight.format)
    second.weights = weights
    first = drafter(target_path)
    for either in (first, second):
        either.inject(features(), 0)
    np.testing.assert_allclose(second.block_hidden(7, 8), first.block_hidden(7, 8), atol=1e-12)


def test_zero_codebook_takes_the_best_of_each_row(target_path: Path) -> None:
    second = drafter(target_path, version=2)
    second.inject(features(), 0)
    best = [int(row.argmax()) for row in second.logits(second.block_hidden(7, 8)[1:])]
    assert second.propose(7, 7) != best
    codebook = second.weights["selector_predecessor.weight"]
    second.weights = {
        **second.weights,
        "selector_predecessor.weight": Weight(np.zeros_like(codebook.values), codebook.format),
    }
    assert second.propose(7, 7) == best


def test_rope_scalings() -> None:
    plain = Rope(10000.0, 64)
    np.testing.assert_allclose(replace(plain, scaling="linear", factor=4.0).frequencies(), plain.frequencies() / 4)
    yarn = replace(plain, scaling="yarn", factor=4.0, original_context=4096).frequencies()
    assert yarn[0] == plain.frequencies()[0]
    assert yarn[-1] == pytest.approx(plain.frequencies()[-1] / 4)
    x = np.random.default_rng(2).standard_normal((3, 2, 80))
    rotated = plain(x, np.array([0, 5, 9]))
    np.testing.assert_array_equal(rotated[0], x[0])
    np.testing.assert_array_equal(rotated[..., 64:], x[..., 64:])
    # A pair is a complex number that is multiplied with exp(i * angle).
    expected = (x[1, 1, 3] + 1j * x[1, 1, 35]) * np.exp(5j * 10000.0 ** (-6 / 64))
    assert rotated[1, 1, 3] + 1j * rotated[1, 1, 35] == pytest.approx(expected)
    adjacent = replace(plain, adjacent=True)(x, np.array([0, 5, 9]))
    expected = (x[2, 0, 6] + 1j * x[2, 0, 7]) * np.exp(9j * 10000.0 ** (-6 / 64))
    assert adjacent[2, 0, 6] + 1j * adjacent[2, 0, 7] == pytest.approx(expected)


def test_int8_activations() -> None:
    x = np.zeros((1, 256))
    x[0, :4] = [127.0, 0.5, 1.5, -2.5]
    x[0, 40] = 254.0
    np.testing.assert_array_equal(quantise_activations(x, 32)[0, :4], [127, 0, 2, -2])
    np.testing.assert_array_equal(int8_activations(x, "Q8_0"), quantise_activations(x, 32))
    np.testing.assert_array_equal(int8_activations(x, "Q4_K"), quantise_activations(x, 256))
    np.testing.assert_array_equal(int8_activations(x, "F16"), x)
