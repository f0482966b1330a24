"""All passes together: what is left of a model, and that it still computes the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.models import architectures, build_graph, read_model_config
from dflashc.compiler.models.config import ModelConfig
from dflashc.passes.choose_forms import choose_forms
from dflashc.passes.merge_projections import merge_projections
from dflashc.passes.operators import name_of
from dflashc.passes.pipeline import optimise
from tests.compiler.models.interpreted import InterpretedModel
from tests.compiler.models.tiny import TinyModel, tiny, variants
from tests.passes.formats import Formats, form_of, mixed, plain, q4_k_m, q8_0
from tests.reference.config import Weights, read_model
from tests.reference.relax_numpy import evaluate
from tests.reference.transformer import ReferenceModel, int8_activations

VARIANTS = variants()
CHUNKS = [(0, [7, 1, 12, 3, 3, 30]), (6, [5, 39]), (7, [0])]
FUSED = {"embed", "rope_table", "norm", "linear_group", "gated_linear", "gated", "attention_block", "softcap",
         "linear_argmax"}


class Built:
    """A written model with its graph, and the formats that its weights are taken to have."""

    def __init__(self, model: TinyModel, folder: Path, formats: Formats = plain, taps: tuple[int, ...] = (0,)) -> None:
        with open_gguf(model.write(folder / "model.gguf")) as file:
            self.config: ModelConfig = read_model_config(file)
            self.graph: tvm.IRModule = build_graph(file, self.config, taps)
        self.reference_config, weights = read_model(folder / "model.gguf")
        self.weights: Weights = {name: replace(w, format=formats(name) if w.values.ndim > 1 else "F32")
                                 for name, w in weights.items()}
        self.formats = {name: weight.format for name, weight in self.weights.items()}
        self.forms = {name: form_of(block_format) for name, block_format in self.formats.items()}

    def optimised(self, dump: Path | None = None) -> tvm.IRModule:
        return optimise(self.graph, self.formats, self.forms, dump)

    def interpreted(self, module: tvm.IRModule) -> InterpretedModel:
        return InterpretedModel(module, self.config, self.weights, self.forms)


def operators(function: relax.Function) -> list[str]:
    """Names of all calls, in order."""
    names = [name_of(b.value) for block in function.body.blocks for b in block.bindings]
    return [name.removeprefix("dflashc.") for name in names if name]


def assert_same(ours: InterpretedModel, other: InterpretedModel) -> None:
    for start, tokens in CHUNKS:
        actual, expected = ours.forward(tokens, start), other.forward(tokens, start)
        np.testing.assert_allclose(actual.logits, expected.logits, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(actual.taps, expected.taps, rtol=1e-5, atol=1e-9)
        assert (actual.ids == expected.ids).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_model_is_unchanged(name: str, tmp_path: Path) -> None:
    built = Built(VARIANTS[name], tmp_path, taps=(1, 0))
    assert_same(built.interpreted(built.optimised()), built.interpreted(built.graph))


@pytest.mark.parametrize("formats", [q8_0, q4_k_m, mixed])
@pytest.mark.parametrize("architecture", architectures())
def test_the_quantised_model_is_that_of_the_unfused_graph(
    architecture: str, formats: Formats, tmp_path: Path
) -> None:
    built = Built(tiny(architecture, width=256), tmp_path, formats)
    unfused = choose_forms(merge_projections(built.graph), built.forms)
    assert {"quantise", "attention", "rms_norm"} <= set(operators(unfused["decode"]))
    assert_same(built.interpreted(built.optimised()), built.interpreted(unfused))


@pytest.mark.parametrize("formats", [q8_0, q4_k_m, mixed])
@pytest.mark.parametrize("architecture", architectures())
def test_the_quantised_model_is_that_of_the_reference(architecture: str, formats: Formats, tmp_path: Path) -> None:
    built = Built(tiny(architecture, width=256), tmp_path, formats)
    ours = built.interpreted(built.optimised())
    reference = ReferenceModel(built.reference_config, built.weights, activation_quantisation=int8_activations)
    for start, tokens in CHUNKS:
        actual, expected = ours.forward(tokens, start), reference.forward(tokens, start)
        np.testing.assert_allclose(actual.logits, expected.logits, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(actual.taps[0], expected.taps[0], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("formats", [plain, q8_0])
@pytest.mark.parametrize("name", VARIANTS)
def test_only_fused_operators_remain(name: str, formats: Formats, tmp_path: Path) -> None:
    for function in Built(VARIANTS[name], tmp_path, formats).optimised().functions.values():
        assert set(operators(function)) <= FUSED


@pytest.mark.parametrize("formats", [q4_k_m, mixed])
@pytest.mark.parametrize("architecture", architectures())
def test_only_fused_operators_remain_of_k_quants(architecture: str, formats: Formats, tmp_path: Path) -> None:
    for function in Built(tiny(architecture, width=256), tmp_path, formats).optimised().functions.values():
        assert set(operators(function)) <= FUSED


def per_layer(architecture: str, formats: Formats, folder: Path) -> list[str]:
    """What one layer more adds, in order; the last call of `decode` is the last residual add."""
    one, two = (operators(Built(tiny(architecture, 256, layers), folder, formats).optimised()["decode"])
                for layers in (1, 2))
    added = two[len(one) - 1 : -1]
    assert [*one[:-1], *added, one[-1]] == two
    return added


DENSE_LAYER = ["norm", "linear_group", "attention_block", "linear_group", "norm", "gated_linear", "linear_group"]


@pytest.mark.parametrize("formats", [plain, q8_0])
@pytest.mark.parametrize("architecture", architectures())
def test_seven_calls_per_layer(architecture: str, formats: Formats, tmp_path: Path) -> None:
    assert per_layer(architecture, formats, tmp_path) == DENSE_LAYER


def test_seven_calls_per_layer_of_two_k_quants(tmp_path: Path) -> None:
    assert per_layer("qwen3", q4_k_m, tmp_path) == DENSE_LAYER


def test_eight_calls_per_layer_where_gate_and_up_differ(tmp_path: Path) -> None:
    expected = [*DENSE_LAYER[:5], "linear_group", "gated", "linear_group"]
    assert per_layer("llama", mixed, tmp_path) == expected


def test_calls_outside_the_layers(tmp_path: Path) -> None:
    model = tiny("gemma3", layers=6).with_metadata(final_logit_softcapping=30.0)
    module = Built(model, tmp_path, q8_0).optimised()
    decode = Counter(operators(module["decode"]))
    assert decode["embed"] == 1
    assert decode["norm"] == 6 * 2 + 1
    assert operators(module["positions"]) == ["rope_table", "rope_table"]
    assert operators(module["logits"]) == ["norm", "linear_group", "softcap"]
    assert operators(module["ids"]) == ["norm", "linear_argmax"]


def test_dump_writes_every_phase(tmp_path: Path) -> None:
    built = Built(tiny("llama"), tmp_path, q8_0)
    module = built.optimised(tmp_path / "new" / "dump")
    files = sorted(path.name for path in (tmp_path / "new" / "dump").iterdir())
    assert files == [
        "00-graph.py", "01-merge_projections.py", "02-fuse_attention.py", "03-fuse_gated_unit.py", "04-fuse_argmax.py",
        "05-fuse_kv_injection.py", "06-separate_projections.py", "07-choose_forms.py", "08-fuse_verify.py",
        "09-fuse_denoise_block.py", "10-fuse_quantise.py", "11-fuse_norm.py", "12-hoist_positions.py",
    ]
    text = (tmp_path / "new" / "dump" / files[-1]).read_text()
    tvm.ir.assert_structural_equal(tvm.script.from_source(text), module)


def test_interpreter_in_float32_stays_close(tmp_path: Path) -> None:
    built = Built(tiny("qwen3"), tmp_path)
    inputs = {name: weight.values for name, weight in built.weights.items()}
    inputs["hidden"] = np.random.default_rng(0).standard_normal((3, 32))
    single, double = (evaluate(built.optimised()["logits"], inputs, dtype=d) for d in (np.float32, np.float64))
    assert (single.dtype, double.dtype) == (np.float32, np.float64)
    np.testing.assert_allclose(single, double, rtol=1e-4, atol=1e-5)
