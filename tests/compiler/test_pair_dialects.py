"""The same drafter in every dialect reads as the same; what is not supported is refused by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashc.compiler.drafter import Drafter, alias_table, dialect_table, is_drafter, markdown, normalise
from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.pair import inspect_drafter
from dflashc.runtime.errors import DflashError, PairError
from tests.compiler.pair_files import HIDDEN, TAPS, VOCABULARY, WINDOW, Content, dialects, drafter
from tests.reference.config import read_drafter

README = Path(__file__).parents[2] / "README.md"
MARKERS = ("<!-- drafter dialects -->", "<!-- end of drafter dialects -->")


def read(content: Content, folder: Path) -> Drafter:
    """The drafter; its file stays open for as long as its tensors live."""
    return normalise(open_gguf(content.write(folder / "drafter.gguf")))


def refusal(content: Content, folder: Path, kind: type[DflashError] = DflashError) -> str:
    with pytest.raises(kind) as caught:
        inspect_drafter(content.write(folder / "drafter.gguf"))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("version", "name"), [(v, name) for v in (1, 2) for name in dialects(v)])
def test_every_dialect_gives_the_same_drafter(version: int, name: str, tmp_path: Path) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    base.mkdir()
    other.mkdir()
    expected, got = read(drafter(version), base), read(dialects(version)[name], other)
    assert got.config == expected.config
    assert got.config.provenance.dialect == name.split()[0]
    assert got.tensors.keys() == expected.tensors.keys() == drafter(version).tensors.keys()
    for tensor in got.tensors:
        np.testing.assert_array_equal(got.tensors[tensor].array(), expected.tensors[tensor].array())
    assert got.notes == ()


@pytest.mark.parametrize("version", [1, 2])
def test_configuration_is_that_of_the_reference(version: int, tmp_path: Path) -> None:
    path = drafter(version).write(tmp_path / "drafter.gguf")
    c, (reference, _) = inspect_drafter(path).config, read_drafter(path)
    for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "epsilon", "block_size", "taps",
                 "causal_sliding", "causal_full", "logit_scale", "logit_softcap"):
        assert getattr(c, name) == getattr(reference, name), name
    assert (c.version, c.mask_id, c.feed_forward) == (version, reference.mask_token, 96)
    assert (c.conv_kernel_size, c.conv_group_size, c.selector_rank, c.selector_top_k) == (
        (2, 16, 32, 4) if version == 2 else (0, 0, 0, 0))
    assert c.layer_windows == tuple(WINDOW if slides else 0 for slides in reference.sliding) == (WINDOW, 0)
    assert (c.target_hidden, c.embedding, c.head, c.embedding_scale) == (HIDDEN, "shared", "shared", 1)
    assert (c.vocabulary, c.draft_vocabulary) == (VOCABULARY if version == 2 else 0, 0)
    assert c.attention_scale == pytest.approx(c.head_size**-0.5)
    base = reference.rope.base
    np.testing.assert_allclose(c.rope.frequencies, base ** -(np.arange(0, 16, 2) / 16), rtol=1e-12)
    assert (c.rope.pairing, c.rope.magnitude) == ("neox", 1)


def test_biases_and_sinks(tmp_path: Path) -> None:
    rows = {"attn_q.bias": 64, "attn_k.bias": 32, "attn_v.bias": 32, "attn_output.bias": HIDDEN, "attn_sinks.weight": 4}
    added = {f"blk.{n}.{name}": np.ones(size) for n in (0, 1) for name, size in rows.items()}
    got = read(dialects(1)["D4"].with_tensors(added), tmp_path)
    assert (got.config.provenance.dialect, got.config.attention_bias, got.config.sinks) == ("D5", True, True)
    assert added.keys() <= got.tensors.keys()
    del added["blk.1.attn_q.bias"]
    assert "1 of 2 layers have a tensor attn_q.bias; expected all or none" in refusal(
        drafter().with_tensors(added), tmp_path)
    del added["blk.0.attn_q.bias"]
    assert "of attn_q.bias, attn_k.bias, attn_v.bias the layers have attn_k.bias, attn_v.bias alone" in refusal(
        drafter().with_tensors(added), tmp_path)


def test_half_of_a_head_rotated(tmp_path: Path) -> None:
    c = read(drafter().with_keys({"dflash.rope.dimension_count": 8}), tmp_path).config
    assert len(c.rope.frequencies) == 4
    text = read(drafter().with_keys({"dflash.rope.dimension_sections": [8, 0, 0, 0]}), tmp_path).config
    assert text == read(drafter(), tmp_path).config
    assert "expected all pairs in the first section" in refusal(
        drafter().with_keys({"dflash.rope.dimension_sections": [4, 2, 2, 0]}), tmp_path)


def test_another_rotary_base_for_the_context(tmp_path: Path) -> None:
    key = "dflash-draft.dflash.backbone_rotary_base"
    base = dialects(1)["D4"]
    for harmless in (0.0, base.keys["dflash-draft.rope.freq_base"]):
        c = read(base.with_keys({key: harmless}), tmp_path).config
        assert c.context_rope == c.rope
    got = read(base.with_keys({key: 5e6}), tmp_path)
    assert got.config.provenance.dialect == "D5"
    np.testing.assert_allclose(got.config.context_rope.frequencies, 5e6 ** -(np.arange(0, 16, 2) / 16), rtol=1e-6)
    assert got.config.rope == read(base, tmp_path).config.rope
    assert dict(got.describe())["rotary"].endswith("another base for the context")
    assert "expected a positive number" in refusal(base.with_keys({key: -1.0}), tmp_path)


def test_optional_scales(tmp_path: Path) -> None:
    keys = {"dflash.embedding_scale": 8.0, "dflash.logit_scale": 0.25, "dflash.final_logit_softcapping": 30.0,
            "dflash.attention.scale": 0.5}
    c = read(drafter().with_keys(keys), tmp_path).config
    assert (c.embedding_scale, c.logit_scale, c.logit_softcap, c.attention_scale) == (8, 0.25, 30, 0.5)
    assert c.provenance.embedding_scale_rule == "key dflash.embedding_scale"


def table(rows: int) -> np.ndarray:
    return np.zeros((rows, HIDDEN))


@pytest.mark.parametrize(("tensors", "embedding", "head", "rows"), [
    ({}, "shared", "shared", 0),
    ({"token_embd.weight": table(300)}, "own", "tied", 300),
    ({"token_embd.weight": table(300), "output.weight": table(300)}, "own", "own", 300),
    ({"output.weight": table(300)}, "shared", "own", 300),
])
def test_whose_embedding_and_head(tensors: dict[str, np.ndarray], embedding: str, head: str, rows: int,
                                  tmp_path: Path) -> None:
    c = read(drafter().with_tensors(tensors), tmp_path).config
    assert (c.embedding, c.head, c.vocabulary) == (embedding, head, rows)


def test_reduced_vocabulary(tmp_path: Path) -> None:
    reduced = {"output.weight": table(40), "d2t": np.arange(40)}
    c = read(drafter().with_tensors(reduced), tmp_path).config
    assert (c.head, c.draft_vocabulary, c.vocabulary) == ("own", 40, 0)
    assert "needs the drafter's own head" in refusal(drafter().with_tensors({"d2t": np.arange(40)}), tmp_path)
    assert "d2t has 39 entries, output.weight 40 rows" in refusal(
        drafter().with_tensors({**reduced, "d2t": np.arange(39)}), tmp_path)
    assert "d2t is F32; expected token ids" in refusal(
        drafter().with_tensors({**reduced, "d2t": np.arange(40.0)}), tmp_path)
    c = read(drafter(2).with_tensors(reduced), tmp_path).config
    assert (c.draft_vocabulary, c.vocabulary) == (40, VOCABULARY)


@pytest.mark.parametrize(("version", "keys", "expected", "rule"), [
    (1, {}, (True, False), "as DFlash trains layers with a window"),
    (1, {"dflash.attention.causal": True}, (True, True), "key dflash.attention.causal"),
    (1, {"dflash.attention.causal": False}, (False, False), "key dflash.attention.causal"),
    (1, {"dflash.attention.sliding_window_pattern": None}, (False, False), "one window for all layers"),
    (1, {"dflash.attention.sliding_window_pattern": [False, False]}, (False, False), "no layer has a window"),
    (2, {}, (False, False), "DFlash2"),
    (2, {"dflash.attention.causal": True}, (True, True), "key dflash.attention.causal"),
])
def test_causality(version: int, keys: dict[str, Any], expected: tuple[bool, bool], rule: str, tmp_path: Path) -> None:
    got = read(drafter(version).with_keys(keys), tmp_path)
    assert (got.config.causal_sliding, got.config.causal_full) == expected
    assert got.config.provenance.causality_rule == rule
    assert ("draft_causal" in got.assumptions) == ("window" in rule and "no layer" not in rule)


def test_windows(tmp_path: Path) -> None:
    pattern, window = "dflash.attention.sliding_window_pattern", "dflash.attention.sliding_window"
    assert read(drafter().with_keys({pattern: None}), tmp_path).config.layer_windows == (WINDOW, WINDOW)
    assert read(drafter().with_keys({pattern: [0, 1]}), tmp_path).config.layer_windows == (0, WINDOW)
    assert read(drafter(1, 0), tmp_path).config.layer_windows == (0, 0)
    assert "marks layers, but" in refusal(drafter().with_keys({window: None}), tmp_path)
    assert "has 3 items, expected 2" in refusal(drafter().with_keys({pattern: [True] * 3}), tmp_path)
    assert "expected a flag for each of 2 layers" in refusal(drafter().with_keys({pattern: 2}), tmp_path)
    assert "expected 0 to" in refusal(drafter().with_keys({window: 1 << 31}), tmp_path)


def test_assumptions_are_said(tmp_path: Path) -> None:
    got = read(drafter().with_keys({"dflash.block_size": None, "dflash.rope.freq_base": None}), tmp_path)
    assert got.config.block_size == 16
    assert ["16 is assumed" in text or "10000 is assumed" in text for text in got.warnings] == [True, True]
    old = read(dialects(1)["D7"], tmp_path)
    assert "--taps-offset -1" in old.assumptions["taps_offset"]


def test_disagreeing_keys_are_said(tmp_path: Path) -> None:
    file = dialects(1)["D4"].with_keys({"tokenizer.ggml.mask_token_id": 5})
    got = read(file, tmp_path)
    assert got.config.mask_id == drafter().keys["tokenizer.ggml.mask_token_id"]
    assert got.warnings == ("keys dflash-draft.dflash.mask_token_id and tokenizer.ggml.mask_token_id disagree; "
                            "the first is used",)


def test_ids_from_zero_win(tmp_path: Path) -> None:
    file = dialects(1)["D4"].with_keys({"dflash-draft.target_layers": [5, 5]})
    assert read(file, tmp_path).config.taps == TAPS


def test_unused_tensors_are_named(tmp_path: Path) -> None:
    got = read(drafter().with_tensors({"blk.7.extra\n.weight": np.zeros(4)}), tmp_path)
    assert got.notes == (r"1 tensor of the drafter is not used: 'blk.7.extra\n.weight'",)
    assert got.tensors.keys() == drafter().tensors.keys()


def test_a_dense_drafter_needs_no_keys_of_others(tmp_path: Path) -> None:
    """Only what shapes and meaning follow from is demanded; the rest has defaults."""
    optional = ["dflash.context_length", "dflash.attention.value_length", "dflash.rope.dimension_count", "general.name",
                "general.version", "general.file_type", *(k for k in drafter().keys if k.startswith("tokenizer."))]
    keys = {**dict.fromkeys(optional), "dflash.mask_token_id": 3, "dflash.target_layers": list(TAPS)}
    got = read(drafter().with_keys(keys), tmp_path)
    assert (got.config.context_length, got.config.taps) == (0, TAPS)
    assert got.notes == ("the file does not say which revision of the drafter it holds",)


LAGUNA = "the laguna decoder (norm per tap, gated attention)"


@pytest.mark.parametrize(("tensor", "feature"), [
    ("markov_w1.weight", "a DSpark drafter"),
    ("conf_proj.bias", "a DSpark drafter"),
    ("dflash.dspark.markov.w1", "a DSpark drafter"),
    ("enc.aux_norm.weight", LAGUNA),
    ("dflash_aux_hidden_norm.0.weight", LAGUNA),
    ("blk.1.attn_gate.weight", LAGUNA),
    ("blk.0.post_ffw_norm.weight", "a body with norms after its sublayers"),
    ("blk.0.post_attention_norm.weight", "a body with norms after its sublayers"),
    ("fc.scale", "weights with a separate scale"),
])
def test_unsupported_tensors(tensor: str, feature: str, tmp_path: Path) -> None:
    message = refusal(drafter().with_tensors({tensor: np.zeros(4)}), tmp_path, PairError)
    assert repr(tensor) in message
    assert feature in message
    assert "not supported" in message


@pytest.mark.parametrize(("key", "value", "harmless"), [
    ("decoder_arch", "laguna", None), ("hidden_activation", "gelu", "silu"), ("attention.value_scale", 0.625, 1.0),
    ("sample_from_anchor", True, False),
    ("hyper_connection.count", 4, 0), ("expert_count", 8, 0), ("dflash.laguna", True, False),
    ("expert_count", [8, 8], None),
])
def test_unsupported_keys(key: str, value: Any, harmless: Any, tmp_path: Path) -> None:
    message = refusal(drafter().with_keys({f"dflash.{key}": value}), tmp_path, PairError)
    assert f"key dflash.{key}" in message
    assert "not supported" in message
    if harmless is not None:
        assert read(drafter().with_keys({f"dflash.{key}": harmless}), tmp_path).config.version == 1


def test_dspark_and_other_architectures(tmp_path: Path) -> None:
    message = refusal(drafter().with_keys({"general.architecture": "dspark"}), tmp_path, PairError)
    assert "a DSpark drafter (Markov head) is not supported" in message
    message = refusal(drafter().with_keys({"general.architecture": "eagle3"}), tmp_path, PairError)
    assert "'eagle3' is no DFlash drafter; expected one of dflash, dflash-draft, dspark, *-dflash-draft" in message
    assert [is_drafter(name) for name in ("dflash", "muse-glimmer-dflash-draft", "-dflash-draft", "dflash2", "qwen3")
            ] == [True, True, False, False, False]


def test_metadata_without_tensors(tmp_path: Path) -> None:
    file = Content(drafter().keys, {})
    assert "has metadata but no tensors" in refusal(file, tmp_path, PairError)


@pytest.mark.parametrize(("version", "tensor", "looked_for"), [
    (1, "fc.weight", "fc.weight or dflash_fc.weight or dflash.fc.weight not found"),
    (1, "blk.1.ffn_norm.weight", "blk.1.ffn_norm.weight or blk.1.post_attention_norm.weight not found"),
    (1, "blk.0.attn_v.weight", "blk.0.attn_v.weight not found"),
    (2, "selector_hidden.weight", "selector_hidden.weight or selector.hidden_proj.weight or dflash.selector.hproj"),
    (2, "blk.1.ffn_conv_base", "blk.1.ffn_conv_base or blk.1.ffn_conv.base not found; a DFlash2 drafter of 2 layers"),
])
def test_missing_tensors(version: int, tensor: str, looked_for: str, tmp_path: Path) -> None:
    assert looked_for in refusal(drafter(version).with_tensors({tensor: None}), tmp_path, PairError)


@pytest.mark.parametrize(("version", "tensor"), [
    *((1, name) for name in drafter(1).tensors if name != "fc.weight"),
    *((2, name) for name in drafter(2).tensors if "conv" in name or "selector" in name),
])
def test_every_shape_is_checked(version: int, tensor: str, tmp_path: Path) -> None:
    values = drafter(version).tensors[tensor]
    wrong = np.concatenate([values, values[..., :1]], axis=-1)
    message = refusal(drafter(version).with_tensors({tensor: wrong}), tmp_path, PairError)
    assert f"tensor {tensor!r} has shape {wrong.shape}; expected (" in message


def test_fusion_must_fit_the_taps(tmp_path: Path) -> None:
    assert "has 128 columns for 3 target layers; expected a multiple" in refusal(
        drafter().with_keys({"dflash.target_layers": [2, 3, 4]}), tmp_path)
    assert "dflash.target_hidden_size is 32, but" in refusal(
        drafter().with_keys({"dflash.target_hidden_size": 32}), tmp_path)
    file = dialects(1)["D4"].with_keys({"dflash-draft.dflash.n_target_features": 100})
    assert "n_target_features is 100, but tensor 'dflash_fc.weight' with 2 target layers says 128" in refusal(
        file, tmp_path)


def test_codebooks_of_unlike_rows(tmp_path: Path) -> None:
    file = drafter(2).with_tensors({"selector_successor.weight": np.zeros((299, 32))})
    assert "selector_predecessor.weight 300, selector_successor.weight 299" in refusal(file, tmp_path)


@pytest.mark.parametrize(("key", "looked_for"), [
    ("dflash.target_layers", "dflash.dflash.target_layer_ids, dflash.target_layer_ids, dflash.target_layers"),
    ("tokenizer.ggml.mask_token_id", "tokenizer.ggml.mask_token_id, dflash.mask_token_id"),
    ("dflash.block_size", "dflash.block_size, dflash.dflash.block_size"),
    ("dflash.conv_kernel_size", "dflash.conv_kernel_size"),
    ("dflash.selector_top_k", "dflash.selector_top_k"),
])
def test_missing_settings_name_what_was_looked_for(key: str, looked_for: str, tmp_path: Path) -> None:
    message = refusal(drafter(2).with_keys({key: None}), tmp_path, PairError)
    assert "; looked for " in message
    assert looked_for in message


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count",
                                 "attention.layer_norm_rms_epsilon"])
def test_missing_sizes(key: str, tmp_path: Path) -> None:
    assert f"dflash.{key}" in refusal(drafter().with_keys({f"dflash.{key}": None}), tmp_path)


@pytest.mark.parametrize(("key", "value", "message"), [
    ("block_size", 1 << 31, "block size is 2147483648; expected 2 to 256 rows"),
    ("block_size", 1, "block size is 1; expected 2 to 256 rows"),
    ("block_size", 0, "block size is 0"),
    ("block_size", 8.0, "expected integer"),
    ("target_layers", list(range(65)), "has 65 entries; expected 1 to 64"),
    ("target_layers", np.arange(1_000_000), "has 1000000 entries; expected 1 to 64"),
    ("target_layers", [-1, 2], "holds -1; expected layer numbers"),
    ("target_layers", [1 << 31, 2], "holds 2147483648; expected layer numbers"),
    ("target_layers", [2, 2], "a layer occurs twice"),
    ("target_layers", 2, "expected array of integer"),
    ("target_layers", ["2", "4"], "expected array of integer"),
    ("block_count", 1 << 31, "expected 1 to 1024"),
    ("block_count", 1000, "blk.2.attn_norm.weight and 14969 more not found"),
    ("block_count", 0, "expected 1 to 1024"),
    ("embedding_length", 1 << 31, "expected 1 to"),
    ("attention.head_count", 0, "expected 1 to"),
    ("attention.head_count_kv", 3, "is 3; expected a divisor of head_count, 4"),
    ("attention.head_count_kv", 1 << 31, "expected 1 to"),
    ("attention.value_length", 8, "is 8, key_length 16; expected equal sizes"),
    ("attention.layer_norm_rms_epsilon", math.nan, "expected a positive number"),
    ("context_length", 1 << 40, "expected 1 to"),
    ("rope.freq_base", -1.0, "expected a positive number"),
    ("rope.dimension_count", 7, "expected an even number up to 16"),
    ("embedding_scale", math.inf, "expected a positive number"),
    ("embedding_scale", "8", "expected float"),
    ("logit_scale", 0.0, "expected a positive number"),
    ("conv_kernel_size", 17, "expected 1 to 16"),
    ("conv_group_size", 0, "expected 1 to"),
    ("conv_group_size", 24, "hidden size 64 does not divide into convolution groups of 24"),
    ("selector_rank", 1 << 31, "expected 1 to"),
    ("selector_top_k", 1 << 31, "expected 1 to 1024"),
    ("attention.causal", 1, "expected bool"),
    ("attention.sliding_window_pattern", ["a", "b"], "expected array of integer"),
])
def test_values_no_drafter_has(key: str, value: Any, message: str, tmp_path: Path) -> None:
    assert message in refusal(drafter(2).with_keys({f"dflash.{key}": value}), tmp_path)


@pytest.mark.parametrize("value", [-1, 1 << 31, "3", 3.0, [3]])
def test_mask_tokens_no_drafter_has(value: Any, tmp_path: Path) -> None:
    assert "tokenizer.ggml.mask_token_id" in refusal(
        drafter().with_keys({"tokenizer.ggml.mask_token_id": value}), tmp_path)


def test_to_show_and_to_store(tmp_path: Path) -> None:
    got = inspect_drafter(dialects(2)["D9"].write(tmp_path / "drafter.gguf"))
    rows = dict(got.describe())
    assert rows["dialect"] == "D9 (qwen35-dflash-draft; Lucebox)"
    assert rows["version"] == "DFlash2"
    assert rows["target layers"] == "1, 3 (qwen35-dflash-draft.dflash.target_layer_ids counts from 0)"
    assert rows["windows"] == f"{WINDOW}, full"
    stored = json.loads(json.dumps(got.to_json()))
    assert stored["config"]["taps"] == list(TAPS)
    assert stored["config"]["provenance"]["stored_taps"] == list(TAPS)
    assert stored["tensors"]["fc.weight"] == ["F32", HIDDEN, 2 * HIDDEN]


def test_tables_come_from_the_aliases() -> None:
    header, *rows = dialect_table()
    assert [row[0] for row in rows] == [f"D{n}" for n in range(1, 10)]
    assert {row[0]: row[-1].split(":")[0] for row in rows if row[-1] != "yes"} == {"D3": "no", "D8": "no"}
    assert all(len(row) == len(header) for row in rows)
    names = {name for _, listed in alias_table()[1:] for name in re.findall(r"`(.+?)`", listed)}
    assert {"{a}.dflash.target_layer_ids", "dflash_fc.weight", "blk.{n}.post_attention_norm.weight"} <= names


def test_readme_has_the_tables() -> None:
    text = README.read_text()
    written = text.split(MARKERS[0])[1].split(MARKERS[1])[0].strip()
    assert written == f"{markdown(dialect_table())}\n\n{markdown(alias_table())}"
