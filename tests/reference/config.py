"""Shapes and weights of the reference models, read from GGUF metadata.

Knows the key names and defaults of the supported architectures; knows nothing about how a model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.reference.functions import Rope

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class Weight:
    """A weight as the file means it: a linear layer's values have shape (out, in)."""

    values: np.ndarray
    format: str


Weights = Mapping[str, Weight]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. `sliding` and `rope` hold one entry a layer; windows and positions count tokens."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rope: tuple[Rope, ...]
    sliding: tuple[bool, ...]
    sliding_window: int = 0
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    logit_softcap: float = 0.0
    gelu: bool = False


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter. `taps` are target layers counted from 0, read after the layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rope: Rope
    context_rope: Rope
    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    sliding: tuple[bool, ...]
    sliding_window: int = 0
    causal_sliding: bool = False
    causal_full: bool = False
    embedding_scale: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    convolution_taps: int = 0
    convolution_group: int = 0
    selector_candidates: int = 0


def read_weights(path: Path, dtype: type[np.floating] = np.float64) -> tuple[Metadata, Weights]:
    """Metadata and all dequantised weights, decoded by the gguf package; of the vocabulary only the special ids."""
    reader = gguf.GGUFReader(path)
    metadata = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("tokenizer.") or key.endswith("_id")
    }
    weights = {
        tensor.name: Weight(_values(tensor, dtype).reshape(tensor.shape[::-1]), tensor.tensor_type.name)
        for tensor in reader.tensors
    }
    return metadata, weights


def _values(tensor: gguf.ReaderTensor, dtype: type[np.floating]) -> np.ndarray:
    """Integers as they are stored, all else decoded to `dtype`."""
    if tensor.data.dtype.kind == "i":
        return tensor.data
    return gguf.dequantize(tensor.data, tensor.tensor_type).astype(dtype)


def read_model(path: Path, dtype: type[np.floating] = np.float64) -> tuple[ModelConfig, Weights]:
    """Config and weights of a target model file."""
    metadata, weights = read_weights(path, dtype)
    return model_config(metadata, weights), weights


def read_drafter(path: Path, dtype: type[np.floating] = np.float64) -> tuple[DrafterConfig, Weights]:
    """Config and weights of a DFlash drafter file (architecture `dflash`)."""
    metadata, weights = read_weights(path, dtype)
    return drafter_config(metadata, weights), weights


def model_config(metadata: Metadata, weights: Weights) -> ModelConfig:
    """Config of a llama, qwen2, qwen3 or gemma3 file."""
    architecture = metadata["general.architecture"]
    shape = _shape(metadata)
    rope = _rope(metadata, shape["head_size"], adjacent=architecture == "llama")
    if "rope_freqs.weight" in weights:
        rope = replace(rope, divisors=weights["rope_freqs.weight"].values)
    layers = shape["layers"]
    if architecture != "gemma3":
        return ModelConfig(
            architecture,
            **shape,
            rope=(rope,) * layers,
            sliding=(False,) * layers,
            attention_scale=metadata.get(f"{architecture}.attention.scale", shape["head_size"] ** -0.5),
        )
    sliding = tuple(layer % 6 < 5 for layer in range(layers))
    sliding_rope = Rope(metadata.get("gemma3.rope.freq_base_swa", 10000.0), rope.dimensions)
    is_27b = layers == 62
    scaled_width = shape["hidden"] // shape["heads"] if is_27b else shape["head_size"]
    return ModelConfig(
        architecture,
        **shape,
        rope=tuple(sliding_rope if is_sliding else rope for is_sliding in sliding),
        sliding=sliding,
        sliding_window=metadata["gemma3.attention.sliding_window"],
        embedding_scale=shape["hidden"] ** 0.5,
        attention_scale=metadata.get("gemma3.attention.scale", scaled_width**-0.5),
        logit_softcap=metadata.get("gemma3.final_logit_softcapping", 0.0),
        gelu=True,
    )


def drafter_config(metadata: Metadata, weights: Weights) -> DrafterConfig:
    """Config of a drafter file; the version shows in the tensors, not in the metadata."""
    shape = _shape(metadata)
    window = metadata.get("dflash.attention.sliding_window", 0)
    pattern = metadata.get("dflash.attention.sliding_window_pattern")
    version_2 = "selector_hidden.weight" in weights
    causal_key = metadata.get("dflash.attention.causal")
    rope = _rope(metadata, shape["head_size"], adjacent=False)
    context_base = metadata.get("dflash.dflash.backbone_rotary_base") or rope.base
    return DrafterConfig(
        **shape,
        rope=rope,
        context_rope=replace(rope, base=context_base),
        block_size=metadata.get("dflash.block_size", 16),
        mask_token=metadata["tokenizer.ggml.mask_token_id"],
        taps=tuple(following - 1 for following in metadata["dflash.target_layers"]),
        sliding=tuple(pattern) if pattern is not None else (window > 0,) * shape["layers"],
        sliding_window=window,
        causal_sliding=bool(pattern and any(pattern) and not version_2) if causal_key is None else causal_key,
        causal_full=causal_key is True,
        embedding_scale=metadata.get("dflash.embedding_scale"),
        logit_scale=metadata.get("dflash.logit_scale", 1.0),
        logit_softcap=metadata.get("dflash.final_logit_softcapping", 0.0),
        convolution_taps=metadata["dflash.conv_kernel_size"] if version_2 else 0,
        convolution_group=metadata["dflash.conv_group_size"] if version_2 else 0,
        selector_candidates=metadata["dflash.selector_top_k"] if version_2 else 0,
    )


def _shape(metadata: Metadata) -> dict[str, Any]:
    prefix = metadata["general.architecture"]
    heads = metadata[f"{prefix}.attention.head_count"]
    hidden = metadata[f"{prefix}.embedding_length"]
    return {
        "layers": metadata[f"{prefix}.block_count"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": metadata.get(f"{prefix}.attention.head_count_kv", heads),
        "head_size": metadata.get(f"{prefix}.attention.key_length", hidden // heads),
        "epsilon": metadata[f"{prefix}.attention.layer_norm_rms_epsilon"],
    }


def _rope(metadata: Metadata, head_size: int, adjacent: bool) -> Rope:
    prefix = metadata["general.architecture"] + ".rope"
    scaling = metadata.get(f"{prefix}.scaling.type", "none")
    return Rope(
        base=metadata.get(f"{prefix}.freq_base", 10000.0),
        dimensions=metadata.get(f"{prefix}.dimension_count", head_size),
        adjacent=adjacent,
        scaling=scaling,
        factor=metadata.get(f"{prefix}.scaling.factor", 1.0),
        original_context=metadata.get(f"{prefix}.scaling.original_context_length", 0),
        attention_factor=metadata.get(f"{prefix}.scaling.attn_factor", 1.0),
        beta_fast=metadata.get(f"{prefix}.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.get(f"{prefix}.scaling.yarn_beta_slow", 1.0),
    )
