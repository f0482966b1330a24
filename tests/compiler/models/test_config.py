"""Configuration from metadata: what is read, and everything that is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.models import architectures, read_model_config
from dflashc.compiler.models.config import ModelConfig
from dflashc.runtime.errors import BuildError, DflashError, GgufError
from tests.compiler.models.tiny import TinyModel, tiny


def config_of(model: TinyModel, folder: Path) -> ModelConfig:
    with open_gguf(model.write(folder / "model.gguf")) as file:
        return read_model_config(file)


def test_architectures() -> None:
    assert set(architectures()) >= {"gemma3", "llama", "qwen2", "qwen3"}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_common_keys(architecture: str, tmp_path: Path) -> None:
    config = config_of(tiny(architecture, layers=3), tmp_path)
    assert config.architecture == architecture
    assert (config.layers, config.hidden, config.feed_forward, config.vocabulary) == (3, 32, 96, 40)
    assert (config.heads, config.kv_heads, config.head_size, config.context_length) == (8, 2, 8, 64)
    assert config.epsilon == pytest.approx(1e-5)
    assert config.attention_scale == pytest.approx(8**-0.5)
    assert config.logit_softcap == 0
    assert {rope.pairing for rope in config.ropes} == {"norm" if architecture == "llama" else "neox"}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_layers_alike(architecture: str, tmp_path: Path) -> None:
    config = config_of(tiny(architecture, layers=3), tmp_path)
    assert [rope.name for rope in config.ropes] == ["global"]
    assert config.layer_ropes == (0, 0, 0)
    assert config.layer_windows == (0, 0, 0)
    assert config.embedding_scale == 1


def test_absent_keys_have_their_defaults(tmp_path: Path) -> None:
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    config = config_of(tiny("llama").with_metadata(**dict.fromkeys(absent)), tmp_path)
    assert (config.kv_heads, config.head_size) == (8, 4)
    np.testing.assert_allclose(config.ropes[0].frequencies, [1, 0.01], rtol=1e-15)


def test_given_scale_and_softcap(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attention__scale": 0.125, "final_logit_softcapping": 30.0}
    for architecture in architectures():
        config = config_of(tiny(architecture).with_metadata(**changes), tmp_path)
        assert (config.attention_scale, config.logit_softcap) == (0.125, 30)


def test_gemma_has_five_sliding_layers_to_a_global_one(tmp_path: Path) -> None:
    config = config_of(tiny("gemma3", layers=8), tmp_path)
    assert config.layer_windows == (4, 4, 4, 4, 4, 0, 4, 4)
    assert [config.ropes[rope].name for rope in config.layer_ropes] == [*["local"] * 5, "global", "local", "local"]
    assert config.embedding_scale == math.sqrt(32)


@pytest.mark.parametrize(("layers", "scale"), [(26, 8**-0.5), (62, (32 // 8) ** -0.5)])
def test_gemma_27b_scales_by_hidden_size_per_head(layers: int, scale: float, tmp_path: Path) -> None:
    assert config_of(tiny("gemma3", layers=layers), tmp_path).attention_scale == scale


def test_unknown_architecture(tmp_path: Path) -> None:
    path = tiny("mamba").write(tmp_path / "model.gguf")
    with open_gguf(path) as file, pytest.raises(BuildError, match=r"'mamba' is not supported; supported: gemma3"):
        read_model_config(file)


@pytest.mark.parametrize("name", ["config", "graph", "../llama", "llama.config"])
def test_names_of_modules_are_no_architectures(name: str, tmp_path: Path) -> None:
    path = tiny(name).write(tmp_path / "model.gguf")
    with open_gguf(path) as file, pytest.raises(BuildError, match="is not supported"):
        read_model_config(file)


def test_a_file_without_embedding(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"tensor token_embd\.weight not found"):
        config_of(tiny("llama").with_tensors({"token_embd.weight": None}), tmp_path)


@pytest.mark.parametrize("key", [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window",
])
def test_missing_keys(key: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=rf"gemma3\.{key}.* is missing"):
        config_of(tiny("gemma3").with_metadata(**{key: None}), tmp_path)


@pytest.mark.parametrize(("key", "value", "message"), [
    ("block_count", 0, "is 0; expected 1 to 1024"),
    ("block_count", 1 << 40, "expected 1 to 1024"),
    ("embedding_length", -32, "is -32; expected 1 to"),
    ("embedding_length", 1 << 40, "expected 1 to"),
    ("feed_forward_length", 0, "is 0; expected 1 to"),
    ("context_length", 1 << 62, "expected 1 to"),
    ("attention.head_count", 0, "is 0; expected 1 to"),
    ("attention.head_count", 1 << 20, "expected 1 to"),
    ("attention.head_count_kv", 0, "is 0; expected a divisor of head_count, 8"),
    ("attention.head_count_kv", 3, "is 3; expected a divisor of head_count, 8"),
    ("attention.head_count_kv", 16, "is 16; expected a divisor of head_count, 8"),
    ("attention.head_count_kv", -2, "is -2; expected a divisor of head_count, 8"),
    ("attention.key_length", 0, "is 0; expected 1 to"),
    ("attention.key_length", -8, "is -8; expected 1 to"),
    ("attention.key_length", 1 << 50, "expected 1 to"),
    ("attention.value_length", 4, "is 4, key_length 8: heads of unlike key and value sizes are not supported"),
    ("attention.layer_norm_rms_epsilon", 0.0, "is 0.0; expected a positive number"),
    ("attention.layer_norm_rms_epsilon", math.nan, "is nan; expected a positive number"),
    ("attention.scale", -1.0, "is -1.0; expected a positive number"),
    ("attention.scale", math.inf, "is inf; expected a positive number"),
    ("attention.sliding_window", 0, "is 0; expected 1 to"),
    ("attention.sliding_window", 1 << 62, "expected 1 to"),
    ("final_logit_softcapping", math.nan, "is nan; expected a positive number"),
    ("rope.freq_base", 0.0, "is 0.0; expected a positive number"),
    ("rope.freq_base", math.inf, "is inf; expected a positive number"),
    ("rope.freq_base_swa", -1.0, "is -1.0; expected a positive number"),
    ("rope.dimension_count", 0, "is 0; expected an even number up to 8"),
    ("rope.dimension_count", 5, "is 5; expected an even number up to 8"),
    ("rope.dimension_count", 16, "is 16; expected an even number up to 8"),
])
def test_values_no_model_has(key: str, value: int | float, message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=rf"gemma3\.{key} .*{message}"):
        config_of(tiny("gemma3").with_metadata(**{key: value}), tmp_path)


@pytest.mark.parametrize(("key", "value"), [
    ("block_count", 2.0), ("attention.head_count", "8"), ("rope.freq_base", 10000), ("rope.scaling.type", 1),
])
def test_values_of_another_type(key: str, value: int | float | str, tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=rf"llama\.{key}.* expected"):
        config_of(tiny("llama").with_metadata(**{key: value}), tmp_path)
