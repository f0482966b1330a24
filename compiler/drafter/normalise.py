"""Reads a drafter of any dialect into one configuration.

Owns the meaning of the metadata and what is assumed where it says nothing. Knows nothing of the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from gguf.constants import GGUFValueType

from dflashc.compiler.drafter import dialects, tensors
from dflashc.compiler.drafter.config import Drafter, DrafterConfig, Provenance
from dflashc.compiler.drafter.dialects import Dialect
from dflashc.compiler.drafter.tensors import Sizes
from dflashc.compiler.gguf import GgufFile, GgufTensor
from dflashc.compiler.gguf.cursor import shown
from dflashc.compiler.models.config import (
    MAX_CONTEXT,
    MAX_DIMENSION,
    MAX_HEAD_SIZE,
    MAX_LAYERS,
    Rope,
    read_count,
    read_positive,
    read_rope,
)
from dflashc.compiler.models.tensor_list import unused_note
from dflashc.runtime.errors import PairError

MAX_BLOCK = 256
MAX_TAPS = 64
_MAX_HEADS = 1024
_MAX_TOKEN = 1 << 31
_DEFAULT_BLOCK = 16  # llama.cpp's, for version 1
_VERSION_2 = {"convolution taps": 16, "convolution group": MAX_DIMENSION, "selector rank": MAX_DIMENSION,
              "selector candidates": 1024}


@dataclass
class _Reading:
    """A drafter being read: what the user should hear of on the way."""

    gguf: GgufFile
    architecture: str
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    assumptions: dict[str, str] = field(default_factory=dict)

    def fail(self, message: str) -> PairError:
        return PairError(f"{self.gguf.paths[0]}: {message}")

    def find(self, setting: str) -> str | None:
        """The key that holds `setting`; others that disagree with it are warned of."""
        metadata = self.gguf.metadata
        present = [key for key in dialects.key_aliases(setting, self.architecture) if key in metadata]
        for other in present[1:]:
            if not np.array_equal(metadata[present[0]], metadata[other]):
                self.warnings.append(f"keys {present[0]} and {other} disagree; the first is used")
        return present[0] if present else None

    def require(self, *settings: str) -> str:
        """The key that holds the first of `settings` that the file has."""
        for setting in settings:
            if key := self.find(setting):
                return key
        looked_for = [key for setting in settings for key in dialects.key_aliases(setting, self.architecture)]
        raise self.fail(f"no {settings[0]}; looked for {', '.join(looked_for)}; convert the drafter again")

    def count(self, setting: str, limit: int) -> int:
        return read_count(self.gguf, self.require(setting), limit)


def normalise(gguf: GgufFile) -> Drafter:
    """Read and check a drafter; no weight is read.

    Parameters
    ----------
    gguf
        A file in any dialect of `dialects.DIALECTS`.

    Raises
    ------
    PairError
        Not a drafter, not a supported one, incomplete, or of shapes that contradict its metadata.
    BuildError, GgufError
        A value that no drafter has, a missing key, or a key of another type.
    """
    architecture = gguf.get_str("general.architecture")
    reading = _Reading(gguf, architecture)
    if not dialects.is_drafter(architecture):
        raise reading.fail(f"architecture {shown(architecture)} is no DFlash drafter; expected one of "
                           + ", ".join(dict.fromkeys(d.architecture for d in dialects.DIALECTS)))
    if architecture == dialects.D8.architecture:
        raise reading.fail(f"{dialects.D8.refused} is not supported; use a DFlash or DFlash2 drafter")
    tensors.refuse_unsupported(gguf)
    _refuse_unsupported_keys(reading)
    return _read(reading)


def _read(r: _Reading) -> Drafter:
    gguf, a = r.gguf, r.architecture
    version = tensors.version(gguf)
    sizes, candidates = _sizes(r, version)
    found, unused = tensors.collect(gguf, sizes.layers)
    tensors.check_shapes(found, sizes)
    r.notes += unused_note("drafter", unused)
    offset, stored, taps_rule = _taps(r)
    windows, has_pattern = _windows(r, sizes.layers)
    causal_sliding, causal_full, causality_rule = _causality(r, version, windows, has_pattern)
    embedding, head, vocabulary, draft_vocabulary = _tables(r, found)
    scale_key = r.find("embedding scale")
    if f"{a}.rope.freq_base" not in gguf.metadata:
        r.warnings.append(f"{a}.rope.freq_base is missing; 10000 is assumed, as llama.cpp does")
    config = DrafterConfig(
        version=version, taps=tuple(tap + offset for tap in stored), block_size=_block_size(r, version),
        mask_id=_mask(r), layers=sizes.layers, hidden=sizes.hidden,
        target_hidden=_target_hidden(r, found["fc.weight"], len(stored)), feed_forward=sizes.feed_forward,
        heads=sizes.heads, kv_heads=sizes.kv_heads, head_size=sizes.head_size,
        context_length=_context_length(r),
        epsilon=read_positive(gguf, f"{a}.attention.layer_norm_rms_epsilon"),
        rope=read_rope(gguf, "drafter", "neox", sizes.head_size), context_rope=_context_rope(r, sizes.head_size),
        layer_windows=windows,
        causal_sliding=causal_sliding, causal_full=causal_full, embedding=embedding, head=head, vocabulary=vocabulary,
        draft_vocabulary=draft_vocabulary,
        embedding_scale=read_positive(gguf, scale_key) if scale_key else 1.0,
        attention_scale=read_positive(gguf, f"{a}.attention.scale", default=1.0 / math.sqrt(sizes.head_size)),
        logit_scale=read_positive(gguf, f"{a}.logit_scale", default=1.0),
        logit_softcap=read_positive(gguf, f"{a}.final_logit_softcapping", default=0.0),
        conv_kernel_size=sizes.conv_kernel_size, conv_group_size=sizes.conv_group_size,
        selector_rank=sizes.selector_rank, selector_top_k=candidates,
        attention_bias=any(f"blk.0.{name}" in found for name in tensors.BIASES),
        sinks=f"blk.0.{tensors.SINKS}" in found,
        provenance=_provenance(r, version, found, stored, offset, taps_rule, causality_rule,
                               f"key {scale_key}" if scale_key else "no key"),
    )
    return Drafter(gguf.paths[0], config, found, tuple(r.notes), tuple(r.warnings), r.assumptions)


def _refuse_unsupported_keys(r: _Reading) -> None:
    metadata = r.gguf.metadata
    for entry in dialects.UNSUPPORTED_KEYS:
        key = entry.key.format(a=r.architecture)
        if key not in metadata:
            continue
        scalar = metadata.fields[key].count is None
        if not (scalar and metadata[key] in entry.harmless):
            value = f" is {shown(str(metadata[key]))}" if scalar else ""
            raise r.fail(f"key {key}{value}: {entry.feature} is not supported; use another drafter")
    sections = r.gguf.get_ints(f"{r.architecture}.rope.dimension_sections", default=[])
    if any(sections[1:]):
        raise r.fail(f"key {r.architecture}.rope.dimension_sections is {sections[:4]}; expected all pairs in the first "
                     "section, as a drafter of text has them")


def _sizes(r: _Reading, version: int) -> tuple[Sizes, int]:
    """The sizes that shapes follow from, and the number of candidates."""
    gguf, a = r.gguf, r.architecture
    hidden = read_count(gguf, f"{a}.embedding_length", MAX_DIMENSION)
    heads = read_count(gguf, f"{a}.attention.head_count", _MAX_HEADS)
    kv_heads = read_count(gguf, f"{a}.attention.head_count_kv", _MAX_HEADS, default=heads)
    head_size = read_count(gguf, f"{a}.attention.key_length", MAX_HEAD_SIZE, default=hidden // heads)
    value_size = gguf.get_int(f"{a}.attention.value_length", default=head_size)
    if heads % kv_heads:
        raise r.fail(f"{a}.attention.head_count_kv is {kv_heads}; expected a divisor of head_count, {heads}")
    if value_size != head_size:
        raise r.fail(f"{a}.attention.value_length is {value_size}, key_length {head_size}; expected equal sizes")
    taps, group, rank, candidates = (
        r.count(setting, limit) if version == 2 else 0 for setting, limit in _VERSION_2.items())
    if version == 2 and hidden % group:
        raise r.fail(f"hidden size {hidden} does not divide into convolution groups of {group}")
    sizes = Sizes(read_count(gguf, f"{a}.block_count", MAX_LAYERS), hidden,
                  read_count(gguf, f"{a}.feed_forward_length", MAX_DIMENSION), heads, kv_heads, head_size,
                  taps, group, rank)
    return sizes, candidates


def _old_layout(r: _Reading) -> bool:
    """Whether a `dflash` file is older than DFlash in llama.cpp: the mask token is not among the tokenizer's keys."""
    metadata = r.gguf.metadata
    return "dflash.mask_token_id" in metadata and "tokenizer.ggml.mask_token_id" not in metadata


def _taps(r: _Reading) -> tuple[int, list[int], str]:
    """What to add to the stored numbers to count layers from 0, the stored numbers, and why."""
    key = r.require(dialects.ZERO_BASED, dialects.ONE_BASED)
    entries = r.gguf.metadata.fields[key].count
    if entries is not None and not 0 < entries <= MAX_TAPS:
        raise r.fail(f"{key} has {entries} entries; expected 1 to {MAX_TAPS}")
    stored = r.gguf.get_ints(key)
    for number in stored:
        if not 0 <= number <= MAX_LAYERS:
            raise r.fail(f"{key} holds {number}; expected layer numbers from 0 to {MAX_LAYERS}")
    if len(set(stored)) != len(stored):
        raise r.fail(f"{key} is {stored}: a layer occurs twice; convert the drafter again")
    if key in dialects.key_aliases(dialects.ZERO_BASED, r.architecture):
        return 0, stored, f"{key} counts from 0"
    if r.architecture == dialects.D7.architecture and _old_layout(r):
        r.assumptions["taps_offset"] = (
            f"{key} is taken to count layers from 0, as the mask token's key is that of old converters; "
            "if few proposals are accepted, give --taps-offset -1")
        return 0, stored, f"{key} counts from 0 in old files"
    return -1, stored, f"{key} counts from 1"


def _target_hidden(r: _Reading, fusion: GgufTensor, taps: int) -> int:
    """Width of a tap: the fusion's columns divided by the taps, which the keys must agree with."""
    columns = fusion.shape[1]
    if columns % taps:
        raise r.fail(f"tensor {fusion.name!r} has {columns} columns for {taps} target layers; expected a multiple")
    for setting, value in (("target hidden size", columns // taps), ("fusion width", columns)):
        key = r.find(setting)
        if key is not None and (said := r.gguf.get_int(key)) != value:
            raise r.fail(f"{key} is {said}, but tensor {fusion.name!r} with {taps} target layers says {value}")
    return columns // taps


def _block_size(r: _Reading, version: int) -> int:
    key = r.find("block size")
    if key is None and version == 1:
        r.warnings.append(f"the file has no block size; {_DEFAULT_BLOCK} is assumed, as llama.cpp does")
        return _DEFAULT_BLOCK
    size = r.gguf.get_int(key or r.require("block size"))
    if not 1 < size <= MAX_BLOCK:
        raise r.fail(f"block size is {size}; expected 2 to {MAX_BLOCK} rows, of which the first is the anchor")
    return size


def _mask(r: _Reading) -> int:
    key = r.require("mask token")
    mask = r.gguf.get_int(key)
    if not 0 <= mask < _MAX_TOKEN:
        raise r.fail(f"{key} is {mask}; expected a token id")
    return mask


def _context_length(r: _Reading) -> int:
    key = f"{r.architecture}.context_length"
    return read_count(r.gguf, key, MAX_CONTEXT) if key in r.gguf.metadata else 0


def _context_rope(r: _Reading, head_size: int) -> Rope:
    """That of injected keys: a base of its own where the file has one (MiMo), else that of the block."""
    key, block_key = r.find("rotary base of the context"), f"{r.architecture}.rope.freq_base"
    if key is None or r.gguf.get_float(key) in (0.0, r.gguf.get_float(block_key, 0.0)):
        return read_rope(r.gguf, "drafter", "neox", head_size)
    return read_rope(r.gguf, "drafter_context", "neox", head_size, base_key=key.removeprefix(f"{r.architecture}."))


def _windows(r: _Reading, layers: int) -> tuple[tuple[int, ...], bool]:
    """Per-layer windows, and whether the file says which layers have one."""
    key = f"{r.architecture}.attention.sliding_window"
    window = r.gguf.get_int(key, default=0)
    if not 0 <= window <= MAX_CONTEXT:
        raise r.fail(f"{key} is {window}; expected 0 to {MAX_CONTEXT} tokens")
    pattern = _pattern(r, f"{key}_pattern", layers)
    if pattern is None:
        return (window,) * layers, False
    if any(pattern) and not window:
        raise r.fail(f"{key}_pattern marks layers, but {key} is missing; convert the drafter again")
    return tuple(window if slides else 0 for slides in pattern), True


def _pattern(r: _Reading, key: str, layers: int) -> list[bool] | None:
    """A flag per layer; some converters write numbers."""
    stored = r.gguf.metadata.fields.get(key)
    if stored is None:
        return None
    if stored.count is None:
        raise r.fail(f"{key} is a single {stored.type_name}; expected a flag for each of {layers} layers")
    if stored.kind is GGUFValueType.BOOL:
        return r.gguf.get_bools(key, length=layers)
    return [bool(flag) for flag in r.gguf.get_ints(key, length=layers)]


def _causality(r: _Reading, version: int, windows: tuple[int, ...], has_pattern: bool) -> tuple[bool, bool, str]:
    """(in layers with a window, in the others, why). Files of `*dflash-draft` write false whatever is true."""
    key = f"{r.architecture}.attention.causal"
    causal = r.gguf.get_bool(key, default=None)
    if causal:
        return True, True, f"key {key}"
    if version == 2:
        return False, False, "DFlash2"
    if causal is False and r.architecture == "dflash":
        return False, False, f"key {key}"
    if any(windows):
        r.assumptions["draft_causal"] = (
            "whether a block is causal in layers with a window is not known: "
            f"{'causal' if has_pattern else 'bidirectional'} is assumed; only the acceptance depends on it, "
            "compare --draft-causal none and swa")
        return (True, False, "as DFlash trains layers with a window") if has_pattern else (
            False, False, "one window for all layers")
    return False, False, "no layer has a window"


def _tables(r: _Reading, found: dict[str, GgufTensor]) -> tuple[
        Literal["own", "shared"], Literal["own", "shared", "tied"], int, int]:
    """Whose embedding and head are used, rows of the drafter's own tables, and those of a reduced head."""
    own_embedding, own_head, reduced = (name in found for name in ("token_embd.weight", "output.weight", "d2t"))
    draft_vocabulary = 0
    if reduced:
        if not own_head:
            raise r.fail("a reduced vocabulary (d2t) needs the drafter's own head, but tensor output.weight is not "
                         "found; use another drafter")
        if found["d2t"].type_name not in ("I32", "I64"):
            raise r.fail(f"d2t is {found['d2t'].type_name}; expected token ids, I32 or I64")
        draft_vocabulary = found["output.weight"].shape[0]
        if found["d2t"].shape != (draft_vocabulary,):
            raise r.fail(f"d2t has {found['d2t'].shape[0]} entries, output.weight {draft_vocabulary} rows; "
                         "expected as many")
    tables = ["token_embd.weight", "selector_predecessor.weight", "selector_successor.weight"]
    rows = {name: found[name].shape[0] for name in (*tables, *([] if reduced else ["output.weight"])) if name in found}
    if len(set(rows.values())) > 1:
        raise r.fail("tables of the drafter have unlike numbers of tokens: "
                     + ", ".join(f"{name} {count}" for name, count in rows.items()))
    head: Literal["own", "shared", "tied"] = "own" if own_head else "tied" if own_embedding else "shared"
    return "own" if own_embedding else "shared", head, next(iter(rows.values()), 0), draft_vocabulary


def _provenance(r: _Reading, version: int, found: dict[str, GgufTensor], stored: list[int], offset: int,
                taps_rule: str, causality_rule: str, embedding_scale_rule: str) -> Provenance:
    dialect = _dialect(r, version, found)
    name, revision = (" ".join(r.gguf.get_str(f"general.{key}", default="").split()) for key in ("name", "version"))
    if not revision:
        r.notes.append("the file does not say which revision of the drafter it holds")
    return Provenance(dialect.id, dialect.producer, r.architecture, name, revision, tuple(stored), offset, taps_rule,
                      causality_rule, embedding_scale_rule)


def _dialect(r: _Reading, version: int, found: dict[str, GgufTensor]) -> Dialect:
    if r.architecture == dialects.D4.architecture:
        extended = any(f"blk.0.{name}" in found for name in (*tensors.BIASES, tensors.SINKS))
        return dialects.D5 if extended or r.find("rotary base of the context") else dialects.D4
    if r.architecture != dialects.D1.architecture:
        return dialects.D9
    if _old_layout(r) or r.find(dialects.ZERO_BASED):
        return dialects.D7
    if version == 1:
        return dialects.D1
    return dialects.D6 if tensors.nested_names(r.gguf) else dialects.D2
