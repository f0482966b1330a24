"""Random target models: the shapes of llama, qwen2, qwen3 and gemma3, their metadata and tensors.

Knows the names that GGUF gives to keys and tensors; knows nothing of block formats or of the byte layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from dflashc.runtime.errors import RequestError

from .tensors import Formats, Tensor, file_type, vector, write_tensors
from .vocabulary import add_vocabulary, synthetic_vocabulary

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_NORM_DEVIATION = 0.1
_BIAS_DEVIATION = 0.1


@dataclass(frozen=True)
class TargetShape:
    """A target model.

    Attributes
    ----------
    tied
        The head is the embedding.
    bias
        Biases on q, k and v; always there for qwen2, possible for llama.
    rope_scaling
        Llama 3's frequency scaling by this factor, written as `rope_freqs`; 1 for none. For llama only.
    sliding_window
        Tokens that five of six layers see; for gemma3 only.
    rotated
        Dimensions of a head that the rotary embedding turns; 0 for all.
    weight_scale
        Standard deviation of linear weights times the square root of their inputs. Near 0 the layers change little,
        and a tied model repeats its last token.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    context_length: int = 32768
    rope_base: float = 1e6
    epsilon: float = 1e-6
    tied: bool = True
    bias: bool = False
    rope_scaling: float = 1.0
    sliding_window: int = 0
    weight_scale: float = 1.0
    rotated: int = 0

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise RequestError(f"architecture {self.architecture!r} is not one of {' '.join(ARCHITECTURES)}")
        if self.heads % self.kv_heads:
            raise RequestError(f"{self.heads} heads do not divide among {self.kv_heads} key-value heads")
        if self.head_size % 2:
            raise RequestError(f"head size {self.head_size} is odd; rotary pairs need an even one")
        if self.rotated % 2 or not 0 <= self.rotated <= self.head_size:
            raise RequestError(f"{self.rotated} rotated dimensions do not fit heads of {self.head_size}")
        if self.bias and self.architecture not in ("llama", "qwen2"):
            raise RequestError(f"{self.architecture} has no biases")
        if self.rope_scaling != 1 and self.architecture != "llama":
            raise RequestError(f"rope_freqs is for llama, not for {self.architecture}")
        if (self.sliding_window > 0) != (self.architecture == "gemma3"):
            raise RequestError(
                f"sliding window {self.sliding_window} does not fit {self.architecture}: gemma3 alone has one"
            )
        if not self.tied and self.architecture == "gemma3":
            raise RequestError("gemma3 has no separate head")


def write_target(path: Path, shape: TargetShape, formats: Formats, seed: int = 0) -> None:
    """Write a random target model with a synthetic vocabulary; the same arguments give the same bytes.

    Raises
    ------
    RequestError
        A row of a tensor is no whole number of blocks of the tensor's format, or the vocabulary is too small.
    """
    write_target_of(path, shape, target_tensors(shape), formats, seed)


def write_target_of(path: Path, shape: TargetShape, tensors: Iterable[Tensor], formats: Formats, seed: int = 0) -> None:
    """`write_target` with given tensors: those of `target_tensors`, changed in their values alone."""
    writer = gguf.GGUFWriter(None, shape.architecture)
    writer.add_name(f"synthetic {shape.architecture}")
    add_shape(writer, shape)
    if shape.sliding_window:
        writer.add_sliding_window(shape.sliding_window)
    writer.add_vocab_size(shape.vocabulary)
    pre_tokenizer = "llama-bpe" if shape.architecture == "llama" else "qwen2"
    add_vocabulary(writer, synthetic_vocabulary(shape.vocabulary), pre_tokenizer)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(file_type(formats))
    write_tensors(path, writer, tensors, formats, seed)


def add_shape(writer: gguf.GGUFWriter, shape: TargetShape) -> None:
    """The keys that targets and drafters have alike."""
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.rotated or shape.head_size)


def target_tensors(shape: TargetShape) -> Iterator[Tensor]:
    """All tensors of a target, in file order."""
    embedding_deviation = shape.hidden**-0.5
    yield Tensor("token_embd.weight", (shape.vocabulary, shape.hidden), embedding_deviation)
    if not shape.tied:
        yield Tensor("output.weight", (shape.vocabulary, shape.hidden), embedding_deviation)
    yield norm("output_norm.weight", shape.hidden)
    if shape.rope_scaling != 1:
        divisors = llama3_divisors(shape.rope_base, shape.head_size, shape.rope_scaling)
        yield Tensor("rope_freqs.weight", divisors.shape, values=divisors, plain=True)
    for layer in range(shape.layers):
        yield from layer_tensors(shape, f"blk.{layer}.")


def layer_tensors(shape: TargetShape, prefix: str) -> Iterator[Tensor]:
    """The tensors of one layer: attention, then feed-forward."""
    hidden, q_rows, kv_rows = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def linear(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(f"{prefix}{name}.weight", (rows, columns), shape.weight_scale * columns**-0.5)

    yield norm(f"{prefix}attn_norm.weight", hidden)
    yield linear("attn_q", q_rows, hidden)
    yield linear("attn_k", kv_rows, hidden)
    yield linear("attn_v", kv_rows, hidden)
    if shape.bias or shape.architecture == "qwen2":
        for name, rows in (("attn_q", q_rows), ("attn_k", kv_rows), ("attn_v", kv_rows)):
            yield vector(f"{prefix}{name}.bias", rows, 0.0, _BIAS_DEVIATION)
    if shape.architecture in ("qwen3", "gemma3"):
        yield norm(f"{prefix}attn_q_norm.weight", shape.head_size)
        yield norm(f"{prefix}attn_k_norm.weight", shape.head_size)
    yield linear("attn_output", hidden, q_rows)
    if shape.architecture == "gemma3":
        yield norm(f"{prefix}post_attention_norm.weight", hidden, shape.weight_scale)
    yield norm(f"{prefix}ffn_norm.weight", hidden)
    yield linear("ffn_gate", shape.feed_forward, hidden)
    yield linear("ffn_up", shape.feed_forward, hidden)
    yield linear("ffn_down", hidden, shape.feed_forward)
    if shape.architecture == "gemma3":
        yield norm(f"{prefix}post_ffw_norm.weight", hidden, shape.weight_scale)


def norm(name: str, size: int, scale: float = 1.0) -> Tensor:
    """Weights of a normalisation: around 1, but not 1, so that a forgotten weight shows."""
    return vector(name, size, scale, _NORM_DEVIATION * scale)


def llama3_divisors(base: float, head_size: int, factor: float) -> np.ndarray:
    """Frequency divisors (head_size / 2,) of Llama 3, float32.

    Wavelengths above the original context of 8192 are scaled by `factor`, those below a quarter of it not at all,
    with a linear blend of the frequencies between (the `llama3` rope type of published configurations).
    """
    frequencies = base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    turns = 8192 * frequencies / (2 * np.pi)
    unscaled_share = np.clip((turns - 1) / (4 - 1), 0, 1)
    return (1 / ((1 - unscaled_share) / factor + unscaled_share)).astype(np.float32)


_TINY = TargetShape("qwen3", 4, 256, 4, 2, 64, 512, 512, context_length=4096)

PRESETS = {
    "tiny-llama": replace(_TINY, architecture="llama", tied=False, rope_scaling=8.0),
    "tiny-qwen2": replace(_TINY, architecture="qwen2"),
    "tiny-qwen3": _TINY,
    "tiny-gemma3": replace(_TINY, architecture="gemma3", layers=6, sliding_window=16),
    "gemma3-270m": TargetShape("gemma3", 18, 640, 4, 1, 256, 2048, 262144, sliding_window=512),
    "llama-3.2-1b": TargetShape(
        "llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, rope_base=5e5, epsilon=1e-5, rope_scaling=32.0
    ),
    "qwen2.5-0.5b": TargetShape("qwen2", 24, 896, 14, 2, 64, 4864, 151936),
    "qwen3-0.6b": TargetShape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960),
    "qwen3-4b": TargetShape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 40960),
}
"""Tiny shapes for tests, and the shapes of published models."""
