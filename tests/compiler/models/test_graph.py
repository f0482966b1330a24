"""The graph of every architecture, interpreted, against the reference models; taps; refusals of tensors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.models import architectures, build_graph, check_model, read_model_config
from dflashc.runtime.errors import BuildError
from tests.compiler.models.interpreted import InterpretedModel
from tests.compiler.models.tiny import TinyModel, random, tiny, variants
from tests.reference.config import read_model
from tests.reference.transformer import ReferenceModel

VARIANTS = variants()
CHUNKS = [(0, [7, 1, 12, 3, 3, 30]), (6, [5, 39]), (6, [20, 21, 22]), (9, [0])]  # the third rolls the second back


def interpreted(model: TinyModel, path: Path, dtype: type, taps: tuple[int, ...] = ()) -> InterpretedModel:
    with open_gguf(model.write(path)) as file:
        config = read_model_config(file)
        module = build_graph(file, config, taps)
    return InterpretedModel(module, config, read_model(path, dtype)[1], dtype=dtype, kv_dtype=dtype)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def test_every_architecture_has_a_variant() -> None:
    assert {model.architecture for model in VARIANTS.values()} == set(architectures())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", VARIANTS)
def test_graph_computes_the_model(name: str, dtype: type, tmp_path: Path) -> None:
    ours = interpreted(VARIANTS[name], tmp_path / "model.gguf", dtype)
    reference = ReferenceModel(*read_model(tmp_path / "model.gguf"))
    for start, tokens in CHUNKS:
        actual, expected = ours.forward(tokens, start), reference.forward(tokens, start)
        assert relative_error(actual.logits, expected.logits) < (1e-4 if dtype is np.float32 else 1e-12)
        assert (actual.ids == expected.logits.argmax(axis=-1)).all()


@pytest.mark.parametrize("taps", [(0,), (1, 0), (1,), (0, 0)])
@pytest.mark.parametrize("architecture", architectures())
def test_taps_are_the_residual_stream_after_the_layer(architecture: str, taps: tuple[int, ...], tmp_path: Path) -> None:
    ours = interpreted(tiny(architecture), tmp_path / "model.gguf", np.float64, taps)
    reference = ReferenceModel(*read_model(tmp_path / "model.gguf"))
    for start, tokens in CHUNKS:
        actual, expected = ours.forward(tokens, start), reference.forward(tokens, start)
        assert len(actual.taps) == len(taps)
        for tap, feature in zip(taps, actual.taps, strict=True):
            np.testing.assert_allclose(feature, expected.taps[tap], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tap", [-1, 2])
def test_taps_outside_the_target_are_refused(tap: int, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=rf"tap after layer {tap} asked for; the target has layers 0 to 1"):
        interpreted(tiny("qwen3"), tmp_path / "model.gguf", np.float64, (0, tap))


def test_weights_are_parameters_of_their_logical_shape(tmp_path: Path) -> None:
    model = tiny("gemma3")
    with open_gguf(model.write(tmp_path / "model.gguf")) as file:
        module = build_graph(file, read_model_config(file))
    named = {p.name: tuple(map(int, p.ty.shape.values)) for f in module.functions.values() for p in f.params
             if p.name in model.tensors}
    assert named == {name: values.shape for name, values in model.tensors.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_walk_reads_the_tensors_of_the_graph(name: str, tmp_path: Path) -> None:
    """And notes those that nothing reads; factors of the rotary embedding are read with the configuration."""
    model = VARIANTS[name].with_tensors({"blk.0.none.weight": np.ones(3)})
    with open_gguf(model.write(tmp_path / "model.gguf")) as file:
        config = read_model_config(file)
        module = build_graph(file, config)
        assert check_model(file, config) == ["1 tensor of the model is not used: 'blk.0.none.weight'"]
    read = {p.name for f in module.functions.values() for p in f.params}
    assert model.tensors.keys() - read - {"rope_freqs.weight"} == {"blk.0.none.weight"}


def tensors_of_a_layer(architecture: str) -> list[str]:
    return [name for name in tiny(architecture).tensors if name.startswith("blk.1.") and not name.endswith(".bias")]


@pytest.mark.parametrize(("architecture", "name"), [
    *((a, name) for a in ("llama", "qwen2", "qwen3", "gemma3") for name in tensors_of_a_layer(a)),
    ("llama", "output_norm.weight"),
    ("llama", "token_embd.weight"),
])
def test_missing_tensors_are_refused(architecture: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"tensor {name} not found"):
        interpreted(tiny(architecture).with_tensors({name: None}), tmp_path / "model.gguf", np.float32)


@pytest.mark.parametrize(("name", "shape"), [
    ("token_embd.weight", (40, 31)),
    ("token_embd.weight", (1280,)),
    ("output_norm.weight", (33,)),
    ("output.weight", (41, 32)),
    ("blk.1.attn_q.weight", (32, 64)),
    ("blk.0.attn_k.weight", (64, 32)),
    ("blk.0.attn_k_norm.weight", (16,)),
    ("blk.1.attn_output.weight", (32, 32)),
    ("blk.1.attn_output.bias", (64,)),
    ("blk.1.ffn_down.weight", (96, 32)),
    ("blk.1.ffn_norm.weight", (1, 32)),
])
def test_tensors_of_another_shape_are_refused(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    model = tiny("qwen3").with_tensors({name: random(name, *shape)})
    with pytest.raises(BuildError, match=re.escape(f"tensor {name} has shape {shape}; expected (")):
        interpreted(model, tmp_path / "model.gguf", np.float32)
