"""A drafter in one form, whatever dialect its file is written in.

Owns the normalised configuration and how it is shown. Knows nothing of keys, aliases or targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflashc.compiler.gguf import GgufTensor
from dflashc.compiler.models.config import Rope
from dflashc.runtime.plan import DRAFTER

PREFIX = DRAFTER
"""In front of the names of the drafter's weights and caches, beside those of the target."""

INJECTED = f"{PREFIX}inject."
"""In front of K and V projections where the injection reads them: all layers side by side, in a copy of their own, for
the block wants each layer's beside its Q."""


@dataclass(frozen=True)
class Provenance:
    """Where a configuration comes from: the file's dialect, and how what it leaves open was decided.

    Attributes
    ----------
    dialect, producer, architecture
        See `dialects.Dialect`; the architecture is the file's own.
    name, revision
        What the file says of itself; empty where it says nothing.
    stored_taps, taps_offset, taps_rule
        The numbers in the file, what is added to them, and why.
    causality_rule, embedding_scale_rule
        What decided.
    """

    dialect: str
    producer: str
    architecture: str
    name: str
    revision: str
    stored_taps: tuple[int, ...]
    taps_offset: int
    taps_rule: str
    causality_rule: str
    embedding_scale_rule: str


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and meaning of a drafter; sizes in elements, windows and positions in tokens.

    Attributes
    ----------
    version
        1, or 2 with convolutions and candidate selector.
    taps
        Target layers, counted from 0, after which the residual stream is read, in the order of `fc.weight`'s columns.
    block_size
        Rows of a trained block, the anchor included.
    context_length
        Longest context the drafter was trained for; 0 where the file does not say.
    context_rope
        Of injected keys; `rope` itself unless the file says otherwise.
    layer_windows
        Per layer; 0 sees the whole context.
    causal_sliding, causal_full
        Whether rows of a block see only rows before them, in layers with and without a window.
    embedding, head
        Whose is used; a tied head is the drafter's own embedding.
    vocabulary
        Rows of the drafter's own embedding, head and codebooks; 0 when it has none.
    draft_vocabulary
        Rows of a reduced head, whose tokens `d2t` names; 0 when the head is whole.
    logit_softcap
        0 for none.
    conv_kernel_size, conv_group_size, selector_rank, selector_top_k
        Of version 2, else 0.
    provenance
        Not compared: two files in different dialects may hold the same drafter.
    """

    version: int
    taps: tuple[int, ...]
    block_size: int
    mask_id: int
    layers: int
    hidden: int
    target_hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    context_length: int
    epsilon: float
    rope: Rope
    context_rope: Rope
    layer_windows: tuple[int, ...]
    causal_sliding: bool
    causal_full: bool
    embedding: Literal["own", "shared"]
    head: Literal["own", "shared", "tied"]
    vocabulary: int
    draft_vocabulary: int
    embedding_scale: float
    attention_scale: float
    logit_scale: float
    logit_softcap: float
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    attention_bias: bool
    sinks: bool
    provenance: Provenance = field(compare=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Drafter:
    """An opened drafter.

    Attributes
    ----------
    tensors
        By canonical name (that of llama.cpp); only those that are used.
    notes, warnings
        For the user: what was left out, and what looks wrong.
    assumptions
        For the user: what was assumed, by the name of the override (`pair.Overrides`) that would settle it.
    """

    path: Path
    config: DrafterConfig
    tensors: Mapping[str, GgufTensor]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    assumptions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "config": self.config.to_json(),
                "tensors": {name: [tensor.type_name, *tensor.shape] for name, tensor in self.tensors.items()},
                "notes": list(self.notes), "warnings": [*self.warnings, *self.assumptions.values()]}

    def describe(self) -> list[tuple[str, str]]:
        """(label, value) rows to print."""
        return [*describe(self.config), *(("note", text) for text in self.notes),
                *(("warning", text) for text in (*self.warnings, *self.assumptions.values()))]


def describe(c: DrafterConfig) -> list[tuple[str, str]]:
    """(label, value) rows of a configuration."""
    p = c.provenance
    rows = [
        ("drafter", " ".join(filter(None, (p.name or "unnamed", p.revision)))),
        ("dialect", f"{p.dialect} ({p.architecture}; {p.producer})"),
        ("version", "DFlash2" if c.version == 2 else "DFlash"),
        ("target layers", f"{_listed(c.taps)} ({p.taps_rule})"),
        ("block size", f"{c.block_size} rows, up to {c.block_size - 1} proposals"),
        ("mask token", str(c.mask_id)),
        ("layers", f"{c.layers} of hidden size {c.hidden}, feed-forward {c.feed_forward}"),
        ("attention", f"{c.heads} heads, {c.kv_heads} for keys and values, of size {c.head_size}"
                      + ", biases" * c.attention_bias + ", sinks" * c.sinks),
        ("rotary", f"{2 * len(c.rope.frequencies)} of {c.head_size} dimensions"
                   + ", another base for the context" * (c.context_rope != c.rope)),
        ("windows", _listed(window or "full" for window in c.layer_windows)),
        ("block attention", f"{_attention(c)} ({p.causality_rule})"),
        ("embedding", f"{_owner(c.embedding)}, scale {c.embedding_scale:g} ({p.embedding_scale_rule})"),
        ("head", _owner(c.head) + (f" with {c.draft_vocabulary} tokens" if c.draft_vocabulary else "")),
    ]
    if c.logit_scale != 1 or c.logit_softcap:
        rows.append(("logits", f"scale {c.logit_scale:g}, softcap {c.logit_softcap:g}"))
    if c.version == 2:
        rows += [("convolution", f"{c.conv_kernel_size} taps, groups of {c.conv_group_size}"),
                 ("selector", f"rank {c.selector_rank}, {c.selector_top_k} candidates")]
    return rows


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


def _owner(whose: str) -> str:
    return {"own": "the drafter's", "shared": "the target's", "tied": "the drafter's embedding"}[whose]


def _attention(c: DrafterConfig) -> str:
    if c.causal_sliding == c.causal_full:
        return "causal" if c.causal_full else "bidirectional"
    return "causal in layers with a window, bidirectional in the others"
