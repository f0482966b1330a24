"""All passes over a pair: what is left of the drafter, and that it still computes the same with quantised inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.compiler.drafter.pairs import PREFIX, BuiltPair, InterpretedPair, write_pair
from tests.passes.formats import Formats, mixed, plain, q4_k_m, q8_0
from tests.passes.test_pipeline import operators
from tests.reference.functions import rms_norm
from tests.reference.transformer import int8_activations

ANCHOR, ROWS = 7, 8
PROMPT = [5, 9, 5, 30, 5, 2, 81]


@pytest.fixture(scope="module", params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module", params=[q8_0, q4_k_m, mixed])
def quantised(request: pytest.FixtureRequest, version: int, tmp_path_factory: pytest.TempPathFactory) -> BuiltPair:
    return BuiltPair(write_pair(tmp_path_factory.mktemp("pair"), 256, version=version), formats=request.param)


def test_the_quantised_pair_is_that_of_the_unfused_graph(quantised: BuiltPair) -> None:
    assert {"quantise", "rope", "cache_write"} <= set(operators(quantised.unfused["inject"]))
    ours, unfused = (InterpretedPair(quantised, module) for module in (quantised.optimised, quantised.unfused))
    for pair in (ours, unfused):
        features, _ = pair.verify(PROMPT, 0)
        pair.inject(features, 0)
    np.testing.assert_allclose(ours.block(ANCHOR, ROWS), unfused.block(ANCHOR, ROWS), rtol=1e-5, atol=1e-9)
    assert ours.propose(ANCHOR, ROWS - 1) == unfused.propose(ANCHOR, ROWS - 1)


def test_the_quantised_pair_is_that_of_the_reference(quantised: BuiltPair) -> None:
    ours = InterpretedPair(quantised, quantised.optimised)
    target, drafter = quantised.references(int8_activations)
    ours.inject(ours.verify(PROMPT, 0)[0], 0)
    drafter.inject(drafter.features(target.forward(PROMPT, 0)), 0)
    norm = quantised.weights[f"{PREFIX}output_norm.weight"].values
    hidden = rms_norm(ours.block(ANCHOR, ROWS), norm, quantised.config.epsilon)
    np.testing.assert_allclose(hidden, drafter.block_hidden(ANCHOR, ROWS), rtol=1e-5, atol=1e-9)
    assert ours.propose(ANCHOR, ROWS - 1) == drafter.propose(ANCHOR, ROWS - 1)


def optimised(folder: Path, formats: Formats, version: int = 1, layers: int = 2) -> dict[str, list[str]]:
    """The calls of each function, in order."""
    module = BuiltPair(write_pair(folder, 256, layers, version), formats=formats).optimised
    return {variable.name_hint: operators(function) for variable, function in module.functions.items()}


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("formats", [q8_0, q4_k_m])
def test_the_injection_is_three_calls_whatever_the_layers(
    formats: Formats, version: int, layers: int, tmp_path: Path
) -> None:
    assert optimised(tmp_path, formats, version, layers)["inject"] == ["linear_group", "norm", "kv_injection"]


def test_the_injection_of_unquantised_weights_is_three_calls(tmp_path: Path) -> None:
    assert optimised(tmp_path, plain)["inject"] == ["linear_group", "norm", "kv_injection"]


@pytest.mark.parametrize("formats", [plain, q8_0, q4_k_m])
def test_taps_and_tables_are_made_once_for_the_round(formats: Formats, version: int, tmp_path: Path) -> None:
    calls = optimised(tmp_path, formats, version)
    assert calls["positions"] == ["rope_table", "rope_table"]
    assert calls["decode"][-1] == "features"
    assert not {"rope_table", "quantise"} & {call for name in ("decode", "inject", "draft") for call in calls[name]}


LAYER = {
    1: ["norm", "linear_group", "attention_block", "linear_group", "norm", "gated_linear", "linear_group"],
    2: ["norm_convolution", "convolution_linear", "linear_group", "attention_block", "linear_group",
        "norm_convolution", "convolution_linear", "gated_linear", "linear_group"],
}


@pytest.mark.parametrize("formats", [plain, q8_0, q4_k_m])
def test_calls_per_layer_of_the_block(formats: Formats, version: int, tmp_path: Path) -> None:
    one, two = (optimised(tmp_path, formats, version, layers)["draft"] for layers in (1, 2))
    layer = LAYER[version]
    assert one == ["embed", "norm", *layer[1:], layer[0]]  # the first norm adds nothing, the last does not norm
    assert two == ["embed", "norm", *layer[1:], *layer, layer[0]]


@pytest.mark.parametrize("formats", [plain, q8_0, q4_k_m])
def test_calls_of_the_proposal(formats: Formats, version: int, tmp_path: Path) -> None:
    expected = {1: ["norm", "linear_argmax"], 2: ["norm", "linear_group", "linear_group", "select_candidates"]}
    assert optimised(tmp_path, formats, version)["propose"] == expected[version]
