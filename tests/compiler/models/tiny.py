"""Random models small enough to write in milliseconds, as GGUF files that a test can bend in any key or tensor.

Knows the key and tensor names of the four architectures; written with the gguf package.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from dflashc.recipes.vocabulary import add_vocabulary, synthetic_vocabulary

Value = int | float | str


@dataclass(frozen=True)
class TinyModel:
    """What goes into a file: metadata without the architecture's prefix, and tensors.

    All sizes follow from `width`: hidden = width, 8 heads on 2 key-value heads of width / 4, feed-forward 3 * width.
    """

    architecture: str
    width: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, np.ndarray]

    def with_metadata(self, **changes: Value | None) -> TinyModel:
        """Keys replaced or, with None, left out; "__" stands for a dot."""
        named = {key.replace("__", "."): value for key, value in changes.items()}
        return replace(self, metadata={k: v for k, v in {**self.metadata, **named}.items() if v is not None})

    def with_tensors(self, changes: Mapping[str, np.ndarray | None]) -> TinyModel:
        """Tensors replaced or, with None, left out."""
        return replace(self, tensors={k: v for k, v in {**self.tensors, **changes}.items() if v is not None})

    def write(self, path: Path, tokenizer: bool = False) -> Path:
        """Write the file, with a tokenizer for its vocabulary if asked for."""
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            name = f"{self.architecture}.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_int64(name, value)
        if tokenizer:
            add_vocabulary(writer, synthetic_vocabulary(len(self.tensors["token_embd.weight"])), "qwen2")
        for name, values in self.tensors.items():
            writer.add_tensor(name, values.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


VOCABULARY = 40
HEADS, KV_HEADS = 8, 2


def tiny(architecture: str, width: int = 32, layers: int = 2, vocabulary: int = VOCABULARY) -> TinyModel:
    """A random model, the same at every call; its head is the embedding, qwen2 has biases on Q, K and V."""
    head = width // 4
    metadata: dict[str, Value] = {
        "block_count": layers,
        "context_length": 64,
        "embedding_length": width,
        "feed_forward_length": 3 * width,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture == "gemma3":
        metadata["attention.sliding_window"] = 4
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _layer(architecture, width, head).items()}
    return TinyModel(architecture, width, metadata, {name: random(name, *shape) for name, shape in shapes.items()})


def _layer(architecture: str, width: int, head: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (HEADS * head, width),
        "attn_k.weight": (KV_HEADS * head, width),
        "attn_v.weight": (KV_HEADS * head, width),
        "attn_output.weight": (width, HEADS * head),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (3 * width, width),
        "ffn_up.weight": (3 * width, width),
        "ffn_down.weight": (width, 3 * width),
    }
    if architecture == "qwen2":
        shapes |= {f"attn_{part}.bias": shapes[f"attn_{part}.weight"][:1] for part in "qkv"}
    if architecture in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    if architecture == "gemma3":
        shapes |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    return shapes


def random(name: str, *shape: int) -> np.ndarray:
    """Values for a tensor of this name: linears keep the size of their input, norms lie around 1, biases around 0."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if len(shape) > 1:
        return values / np.float32(np.sqrt(shape[-1]))
    return values * np.float32(0.3) + np.float32(name.endswith(".weight"))


def variants(width: int = 32, vocabulary: int = VOCABULARY) -> dict[str, TinyModel]:
    """One model per thing that a file of an architecture can have or lack."""
    llama, qwen2, qwen3, gemma3 = (
        tiny(architecture, width, vocabulary=vocabulary) for architecture in ("llama", "qwen2", "qwen3", "gemma3")
    )
    head = width // 4
    biased = {"attn_q": HEADS * head, "attn_k": KV_HEADS * head, "attn_v": KV_HEADS * head, "attn_output": width,
              "ffn_down": width}
    return {
        "llama": llama,
        "llama with a head and Llama 3 frequencies": llama.with_tensors(
            {
                "output.weight": random("output.weight", vocabulary, width),
                "rope_freqs.weight": np.geomspace(1, 8, head // 2),
            }
        ),
        "llama with biases and half of a head rotated": llama.with_tensors(
            {
                f"blk.{layer}.{name}.bias": random(f"{layer}.{name}.bias", rows)
                for layer in range(2)
                for name, rows in biased.items()
            }
        ).with_metadata(rope__dimension_count=head // 2),
        "qwen2": qwen2,
        "qwen2 with yarn": qwen2.with_metadata(
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=32,
            rope__scaling__attn_factor=0.9,
        ),
        "qwen3": qwen3,
        "qwen3 with linear scaling": qwen3.with_metadata(rope__scaling__type="linear", rope__scaling__factor=8.0),
        "gemma3": gemma3,
        "gemma3 with global layers and a softcap": tiny("gemma3", width, 7, vocabulary).with_metadata(
            rope__scaling__type="linear",
            rope__scaling__factor=8.0,
            rope__freq_base=1e6,
            rope__freq_base_swa=5000.0,
            final_logit_softcapping=3.0,
        ),
    }
