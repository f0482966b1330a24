"""Tiny pairs as files that a test can bend in any key or tensor, and the same drafter in every dialect.

Read and written with the gguf package; the names of each dialect are spelled out here, apart from the code under test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGUFValueType

from dflashc.recipes.drafter import DrafterShape, drafter_body, write_drafter
from dflashc.recipes.target import TargetShape, write_target
from dflashc.recipes.tensors import Formats

LAYERS, HIDDEN, VOCABULARY, TAPS, WINDOW = 6, 64, 300, (1, 3), 32
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True)
class Content:
    """What a file holds: values by full key, and tensors in F32."""

    keys: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]

    def with_keys(self, changes: Mapping[str, Any]) -> Content:
        """Keys replaced or, with None, left out."""
        return replace(self, keys={k: v for k, v in {**self.keys, **changes}.items() if v is not None})

    def with_tensors(self, changes: Mapping[str, np.ndarray | None]) -> Content:
        """Tensors replaced or, with None, left out."""
        return replace(self, tensors={k: v for k, v in {**self.tensors, **changes}.items() if v is not None})

    def renamed(self, keys: Callable[[str], str], tensors: Callable[[str], str]) -> Content:
        return Content({keys(k): v for k, v in self.keys.items()}, {tensors(k): v for k, v in self.tensors.items()})

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.keys["general.architecture"])
        for key, value in self.keys.items():
            if key != "general.architecture":
                kind, item = _kinds(value)
                writer.add_key_value(key, value.tolist() if isinstance(value, np.ndarray) else value, kind, item)
        for name, values in self.tensors.items():
            writer.add_tensor(name, values if values.dtype == np.int64 else values.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _kinds(value: Any) -> tuple[GGUFValueType, GGUFValueType | None]:
    if isinstance(value, (list, np.ndarray)):
        return GGUFValueType.ARRAY, _kinds(value[0] if len(value) else 0)[0]
    if isinstance(value, (bool, np.bool_)):
        return GGUFValueType.BOOL, None
    if isinstance(value, (int, np.integer)):
        return (GGUFValueType.UINT32 if 0 <= value < 1 << 32 else GGUFValueType.INT64), None
    return (GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.STRING), None


def _read(path: Path) -> Content:
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return Content(keys, {t.name: np.array(t.data) for t in reader.tensors})


@cache
def target(architecture: str = "qwen3") -> Content:
    """A target of 6 layers, hidden size 64 and 300 tokens, the last of them unused padding."""
    shape = TargetShape(architecture, LAYERS, HIDDEN, 4, 2, 16, 96, VOCABULARY, context_length=512,
                        sliding_window=16 if architecture == "gemma3" else 0)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "target.gguf"
        write_target(path, shape, Formats("F32"))
        return _read(path)


@cache
def drafter(version: int = 1, window: int = WINDOW) -> Content:
    """A drafter of 2 layers for any `target()`, as llama.cpp writes it (D1 or D2): block of 8, first layer sliding."""
    with TemporaryDirectory() as folder:
        target_path, path = Path(folder) / "target.gguf", Path(folder) / "drafter.gguf"
        target().write(target_path)
        shape = DrafterShape(drafter_body(target_path, layers=2), TAPS, 8, window, version, selector_rank=32,
                             selector_candidates=4)
        write_drafter(path, target_path, shape, Formats("F32"))
        return _read(path).with_keys({"general.version": "r1"})


def untokenized(content: Content) -> Content:
    """Without a vocabulary, and so without the mask token."""
    return content.with_keys({key: None for key in content.keys if key.startswith("tokenizer.")})


def dialects(version: int) -> dict[str, Content]:
    """The drafter of this version in every dialect that can hold it."""
    base = drafter(version)
    found = {"D1" if version == 1 else "D2": base, "D4": _nested(base, "dflash-draft", "dflash_", {}),
             "D7": _old(base), "D7 with target_layer_ids": _older(base),
             "D9": untokenized(_lucebox(base)).with_keys({"qwen35-dflash-draft.vocab_size": VOCABULARY})}
    if version == 2:
        found["D6"] = base.renamed(lambda k: k, _renamer(NESTED))
    return found


NESTED = {
    "selector_hidden.weight": "selector.hidden_proj.weight",
    "selector_predecessor.weight": "selector.pred_codebook",
    "selector_successor.weight": "selector.succ_codebook",
    "attn_conv_base": "attn_conv.base",
    "attn_conv_proj": "attn_conv.proj",
    "ffn_conv_base": "ffn_conv.base",
    "ffn_conv_proj": "ffn_conv.proj",
}
LUCEBOX = {
    **NESTED,
    "selector_hidden.weight": "dflash.selector.hproj.weight",
    "selector_predecessor.weight": "dflash.selector.pred_cb",
    "selector_successor.weight": "dflash.selector.succ_cb",
}


def _renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    """Replaces names, or what follows the layer in a name."""

    def rename(name: str) -> str:
        layer, rest = re.fullmatch(r"(blk\.\d+\.)?(.*)", name).groups()  # type: ignore[union-attr]
        stem = rest.removesuffix(".weight")
        return (layer or "") + names.get(rest, names.get(stem, stem) + rest[len(stem):])

    return rename


def _nested(base: Content, architecture: str, fusion: str, names: Mapping[str, str]) -> Content:
    """D4: keys under `A.dflash.`, layers counted from 0, the FFN norm named as in Hugging Face's layers."""
    moved = {"block_size": "dflash.block_size", "target_layers": "dflash.target_layer_ids"}

    def key(name: str) -> str:
        prefix, _, rest = name.partition(".")
        return f"{architecture}.{moved.get(rest, rest)}" if prefix == "dflash" else name

    tensors = {"fc.weight": f"{fusion}fc.weight", "enc.output_norm.weight": f"{fusion}hidden_norm.weight",
               "ffn_norm": "post_attention_norm", **NESTED, **names}
    return base.renamed(key, _renamer(tensors)).with_keys({
        "general.architecture": architecture,
        "tokenizer.ggml.mask_token_id": None,
        f"{architecture}.dflash.mask_token_id": base.keys["tokenizer.ggml.mask_token_id"],
        f"{architecture}.dflash.target_layer_ids": list(TAPS),
        f"{architecture}.dflash.n_target_features": len(TAPS) * HIDDEN,
        f"{architecture}.attention.causal": False,
    })


def _lucebox(base: Content) -> Content:
    """D9: D4 with dots in the names of the fusion, and keys of version 2 one level further down."""
    content = _nested(base, "qwen35-dflash-draft", "dflash.", {**LUCEBOX, "ffn_norm": "ffn_norm"})
    prefix = "qwen35-dflash-draft."
    return content.renamed(lambda k: re.sub(rf"^{prefix}(conv|selector)_", rf"{prefix}dflash.dflash2.\1_", k),
                           lambda name: name)


def _old(base: Content) -> Content:
    """D7: the mask token among the model's keys, layers counted from 0 under the name that later counts from 1."""
    return base.renamed(lambda k: k, _renamer({"enc.output_norm.weight": "hidden_norm.weight"})).with_keys({
        "tokenizer.ggml.mask_token_id": None,
        "dflash.mask_token_id": base.keys["tokenizer.ggml.mask_token_id"],
        "dflash.target_layers": list(TAPS),
        "dflash.target_hidden_size": HIDDEN,
    })


def _older(base: Content) -> Content:
    """D7 as fewer files have it: `target_layer_ids`, and the fusion's names with dots."""
    names = {"fc.weight": "dflash.fc.weight", "enc.output_norm.weight": "dflash.hidden_norm.weight"}
    return base.renamed(lambda k: k, _renamer(names)).with_keys({
        "tokenizer.ggml.mask_token_id": None,
        "dflash.mask_token_id": base.keys["tokenizer.ggml.mask_token_id"],
        "dflash.target_layers": None,
        "dflash.target_layer_ids": list(TAPS),
    })
