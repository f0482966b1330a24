"""The GGUF dialects of DFlash drafters, as data: who wrote them, what they call things, what is not supported.

Owns every alias; canonical names are those of llama.cpp (dialects D1 and D2). Knows nothing of values or shapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """A family of files.

    Attributes
    ----------
    id
        Short name, as in the documentation.
    architecture
        Value of `general.architecture`; `*` stands for the name of a target.
    producer
        Who writes such files.
    sign
        What tells it from others of its architecture.
    versions
        Versions of DFlash found in it.
    refused
        Why it is not supported; empty when it is.
    """

    id: str
    architecture: str
    producer: str
    sign: str
    versions: str
    refused: str = ""


DSPARK = "a DSpark drafter (Markov head)"
LAGUNA = "the laguna decoder (norm per tap, gated attention)"

D1 = Dialect("D1", "dflash", "llama.cpp", "no selector tensors", "1")
D2 = Dialect("D2", "dflash", "llama.cpp", "`selector_hidden.weight`", "2")
D3 = Dialect("D3", "dflash", "llama.cpp", "`markov_w1.weight`", "DSpark", DSPARK)
D4 = Dialect("D4", "dflash-draft", "BeeLlama, buun-llama-cpp, ik_llama.cpp", "keys `dflash-draft.dflash.*`", "1, 2")
D5 = Dialect("D5", "dflash-draft", "ik_llama.cpp",
             "biases, sinks or a rotary base of the context; `laguna` and value scales are refused", "1, 2")
D6 = Dialect("D6", "dflash", "buun-llama-cpp", "nested names such as `selector.hidden_proj.weight`", "2")
D7 = Dialect("D7", "dflash", "converters older than DFlash in llama.cpp", "`dflash.mask_token_id`", "1, 2")
D8 = Dialect("D8", "dspark", "PrismML fork of llama.cpp", "the architecture", "DSpark", DSPARK)
D9 = Dialect("D9", "*-dflash-draft", "Lucebox", "the architecture", "1, 2")
DIALECTS = (D1, D2, D3, D4, D5, D6, D7, D8, D9)

_ARCHITECTURES = re.compile("|".join(re.escape(d.architecture).replace(r"\*", r"[\w.-]+") for d in DIALECTS))

# `{a}` stands for the architecture. The first that a file has is used.
KEYS: dict[str, tuple[str, ...]] = {
    "target layers, numbered from 0": (
        "{a}.dflash.target_layer_ids", "{a}.target_layer_ids", "dflash.target_layer_ids"),
    "target layers, numbered from 1": ("{a}.target_layers", "{a}.dflash.target_layers"),
    "block size": ("{a}.block_size", "{a}.dflash.block_size"),
    "mask token": ("{a}.dflash.mask_token_id", "tokenizer.ggml.mask_token_id", "{a}.mask_token_id"),
    "target hidden size": ("{a}.target_hidden_size", "{a}.dflash.target_hidden_size"),
    "fusion width": ("{a}.dflash.n_target_features", "{a}.n_target_features"),
    "convolution taps": (
        "{a}.conv_kernel_size", "{a}.dflash.conv_kernel_size", "{a}.dflash.dflash2.conv_kernel_size"),
    "convolution group": ("{a}.conv_group_size", "{a}.dflash.conv_group_size", "{a}.dflash.dflash2.conv_group_size"),
    "selector rank": ("{a}.selector_rank", "{a}.dflash.selector_rank", "{a}.dflash.dflash2.selector_rank"),
    "selector candidates": ("{a}.selector_top_k", "{a}.dflash.selector_top_k", "{a}.dflash.dflash2.selector_top_k"),
    "rotary base of the context": ("{a}.dflash.backbone_rotary_base",),
    "embedding scale": ("{a}.embedding_scale", "{a}.dflash.embedding_scale"),
}
ZERO_BASED, ONE_BASED = tuple(KEYS)[:2]

# Names other than the canonical one; `{n}` stands for the layer.
TENSORS: dict[str, tuple[str, ...]] = {
    "fc.weight": ("dflash_fc.weight", "dflash.fc.weight"),
    "enc.output_norm.weight": ("dflash_hidden_norm.weight", "dflash.hidden_norm.weight", "hidden_norm.weight"),
    "selector_hidden.weight": ("selector.hidden_proj.weight", "dflash.selector.hproj.weight"),
    "selector_predecessor.weight": ("selector.pred_codebook", "dflash.selector.pred_cb"),
    "selector_successor.weight": ("selector.succ_codebook", "dflash.selector.succ_cb"),
    "blk.{n}.ffn_norm.weight": ("blk.{n}.post_attention_norm.weight",),
    "blk.{n}.attn_conv_base": ("blk.{n}.attn_conv.base",),
    "blk.{n}.attn_conv_proj.weight": ("blk.{n}.attn_conv.proj.weight",),
    "blk.{n}.ffn_conv_base": ("blk.{n}.ffn_conv.base",),
    "blk.{n}.ffn_conv_proj.weight": ("blk.{n}.ffn_conv.proj.weight",),
}

# Tensors, as regular expressions, of features that change what a drafter computes.
UNSUPPORTED_TENSORS = (
    (r"markov_.*|dflash\.dspark\..*|conf_proj\..*|confidence_head\..*", DSPARK),
    (r"enc\.aux_norm\..*|dflash[._]aux_hidden_norm\..*|blk\.\d+\.attn_gate\..*", LAGUNA),
    (r"blk\.\d+\.(post_ffw_norm|layer_output_scale)\..*", "a body with norms after its sublayers"),
    (r".*\.scale", "weights with a separate scale"),
)


@dataclass(frozen=True)
class UnsupportedKey:
    """A key that changes what the drafter computes, unless it has a harmless value."""

    key: str
    harmless: tuple[object, ...]
    feature: str


UNSUPPORTED_KEYS = (
    UnsupportedKey("{a}.dflash.laguna", (False,), LAGUNA),
    UnsupportedKey("{a}.decoder_arch", (), "another decoder than Qwen3's"),
    UnsupportedKey("{a}.hidden_activation", ("silu",), "another activation than silu"),
    UnsupportedKey("{a}.attention.value_scale", (1.0,), "scaled values in attention (MiMo)"),
    UnsupportedKey("{a}.sample_from_anchor", (False,), DSPARK),
    UnsupportedKey("{a}.has_confidence_head", (False,), DSPARK),
    UnsupportedKey("{a}.hyper_connection.count", (0,), "hyper-connections (DeepSeek-V4)"),
    UnsupportedKey("{a}.hc_mult", (0, 1), "hyper-connections (DeepSeek-V4)"),
    UnsupportedKey("{a}.expert_count", (0,), "a mixture of experts"),
)


def is_drafter(architecture: str) -> bool:
    """Whether files of this architecture are DFlash drafters, supported or not."""
    return _ARCHITECTURES.fullmatch(architecture) is not None


def key_aliases(setting: str, architecture: str) -> tuple[str, ...]:
    """The keys under which a file may hold `setting` of `KEYS`, in order of preference."""
    return tuple(dict.fromkeys(key.format(a=architecture) for key in KEYS[setting]))


def tensor_aliases(canonical: str) -> tuple[str, ...]:
    """The names that a tensor may have, the canonical one first."""
    layer = re.match(r"blk\.(\d+)\.", canonical)
    if layer is None:
        return canonical, *TENSORS.get(canonical, ())
    number = layer[1]
    general = "blk.{n}." + canonical[layer.end():]
    return canonical, *(name.format(n=number) for name in TENSORS.get(general, ()))


def dialect_table() -> list[tuple[str, ...]]:
    """The dialects as rows of a table, the header first."""
    header = ("dialect", "`general.architecture`", "written by", "told by", "DFlash version", "supported")
    return [header, *((d.id, f"`{d.architecture}`", d.producer, d.sign, d.versions,
                       f"no: {d.refused}" if d.refused else "yes") for d in DIALECTS)]


def alias_table() -> list[tuple[str, ...]]:
    """What a setting or tensor may be called, as rows of a table, the header first."""
    keys = [(setting, *(f"`{key}`" for key in names)) for setting, names in KEYS.items()]
    tensors = [(f"`{name}`", *(f"`{alias}`" for alias in aliases)) for name, aliases in TENSORS.items()]
    return [("setting or tensor", "names, in order of preference"),
            *((what, ", ".join(names)) for what, *names in (*keys, *tensors))]


def markdown(rows: list[tuple[str, ...]]) -> str:
    """Rows as a Markdown table."""
    header, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([header, "|" + " --- |" * len(rows[0]), *body])
