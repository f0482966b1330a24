"""The pair check: pairs that fit, every refusal with both values, and what the user may override."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashc.compiler.build import BuildOptions, lower
from dflashc.compiler.drafter import normalise
from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.models import architectures, read_model_config
from dflashc.compiler.pair import Overrides, PairReport, check, check_pair, inspect_drafter
from dflashc.runtime.errors import BuildError, DflashError, PairError, RequestError
from tests.compiler.pair_files import ARCHITECTURES, HIDDEN, LAYERS, TAPS, VOCABULARY, Content, drafter, target
from tests.compiler.pair_files import dialects as in_every_dialect

PYCODE = Path(__file__).parents[2] / "recipes" / "pycode-3m"
MASK = int(drafter().keys["tokenizer.ggml.mask_token_id"])
TOKENS: list[str] = drafter().keys["tokenizer.ggml.tokens"]
TYPES: list[int] = drafter().keys["tokenizer.ggml.token_type"]
USED = 275  # of the 300 tokens; the rest are padding
TOKENIZER = dict.fromkeys(key for key in drafter().keys if key.startswith("tokenizer."))


def run(folder: Path, first: Content, second: Content, **stated: Any) -> PairReport:
    paths = first.write(folder / "target.gguf"), second.write(folder / "drafter.gguf")
    return check(*paths, Overrides(**stated))


def refusal(folder: Path, first: Content, second: Content, **stated: Any) -> str:
    with pytest.raises(DflashError) as caught:
        run(folder, first, second, **stated)
    assert isinstance(caught.value, PairError)
    message = str(caught.value)
    assert "\n" not in message
    return message


def stored_taps(*numbers: int) -> Content:
    """A drafter that reads these layers, as they are stored by llama.cpp."""
    fusion = np.zeros((HIDDEN, len(numbers) * HIDDEN))
    return drafter().with_keys({"dflash.target_layers": list(numbers)}).with_tensors({"fc.weight": fusion})


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_can_be_tapped(architecture: str, version: int, tmp_path: Path) -> None:
    assert set(ARCHITECTURES) <= set(architectures())
    file = drafter(version).with_keys(dict(TOKENIZER)).with_keys({"tokenizer.ggml.mask_token_id": MASK})
    report = run(tmp_path, target(architecture), file)
    assert (report.target_architecture, report.config.taps) == (architecture, TAPS)


@pytest.mark.parametrize("version", [1, 2])
def test_every_dialect_fits(version: int, tmp_path: Path) -> None:
    for content in in_every_dialect(version).values():
        report = run(tmp_path, target(), content)
        assert (report.config.taps, report.config.version, report.vocabulary) == (TAPS, version, VOCABULARY)
        assert report.mask_token == "<|mask|>"


@pytest.mark.parametrize("name", ["dflash-f16", "dflash-q8_0", "dflash2-f16", "dflash2-q8_0"])
@pytest.mark.parametrize("form", ["f16", "q8_0", "q4_k_m"])
def test_the_shipped_pair(name: str, form: str) -> None:
    report = check(PYCODE / f"pycode-3m-{form}.gguf", PYCODE / f"pycode-3m-{name}.gguf")
    assert report.warnings == ()
    assert (report.config.version, report.config.taps) == (2 if "dflash2" in name else 1, (0, 1, 2))
    assert (report.config.block_size, report.mask_token, report.vocabulary) == (16, "<|mask|>", 2048)


def test_the_check_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    paths = target().write(tmp_path / "target.gguf"), drafter(2).write(tmp_path / "drafter.gguf")
    monkeypatch.setattr("dflashc.compiler.gguf.tensor.GgufTensor.data", read)
    check(*paths)


def test_files_in_the_wrong_places(tmp_path: Path) -> None:
    assert "is a drafter and" in (message := refusal(tmp_path, drafter(), target()))
    assert "give them the other way round" in message
    assert "are both drafters; give the target first" in refusal(tmp_path, drafter(), drafter(2))
    assert "is a model of architecture 'qwen3', not a DFlash drafter" in refusal(tmp_path, target(), target())


def test_a_target_that_is_not_supported(tmp_path: Path) -> None:
    unknown = target().with_keys({"general.architecture": "mamba"})
    with pytest.raises(BuildError, match="'mamba' is not supported; supported: "):
        run(tmp_path, unknown, drafter())


def test_hidden_sizes(tmp_path: Path) -> None:
    path = target().write(tmp_path / "target.gguf")
    with open_gguf(path) as target_gguf, open_gguf(drafter().write(tmp_path / "drafter.gguf")) as drafter_gguf:
        read, config = normalise(drafter_gguf), read_model_config(target_gguf)
        with pytest.raises(PairError, match="reads hidden states of size 64, the target has 96; use a drafter made"):
            check_pair(target_gguf, replace(config, hidden=96), drafter_gguf, read)
        narrow = replace(read, config=replace(read.config, hidden=32))
        with pytest.raises(PairError, match=r"size 32 has no embedding and no head of its own .* target's of 64"):
            check_pair(target_gguf, config, drafter_gguf, narrow)
        own = replace(read, config=replace(read.config, hidden=32, embedding="own", head="tied", vocabulary=VOCABULARY))
        assert check_pair(target_gguf, config, drafter_gguf, own).config.hidden == 32


@pytest.mark.parametrize(("stored", "message"), [
    ((2, LAYERS + 1), "[2, 7] in the file and [1, 6] counted from 0, the target has layers 0 to 5"),
    ((0, 2), "[0, 2] in the file and [-1, 1] counted from 0, the target has layers 0 to 5"),
    ((2, LAYERS), "[2, 6] in the file and [1, 5] counted from 0, but the target's last layer, 5, cannot be tapped"),
])
def test_taps_outside_the_target(stored: tuple[int, ...], message: str, tmp_path: Path) -> None:
    refused = refusal(tmp_path, target(), stored_taps(*stored))
    assert message in refused
    assert "--taps-offset" in refused


def test_taps_of_any_order_inside_the_target(tmp_path: Path) -> None:
    assert run(tmp_path, target(), stored_taps(1, LAYERS - 1)).config.taps == (0, LAYERS - 2)
    assert run(tmp_path, target(), stored_taps(4, 2)).config.taps == (3, 1)


def test_the_other_numbering_looks_like_the_published_one(tmp_path: Path) -> None:
    """Published drafters read layer 1 first and the third last at the end."""
    report = run(tmp_path, target(), stored_taps(1, LAYERS - 3))
    assert report.config.taps == (0, LAYERS - 4)
    (warning,) = (text for text in report.warnings if "published" in text)
    assert "give --taps-offset 0" in warning
    settled = run(tmp_path, target(), stored_taps(1, LAYERS - 3), taps_offset=0)
    assert settled.config.taps == (1, LAYERS - 3)
    assert not any("published" in text for text in settled.warnings)
    assert not any("published" in text for text in run(tmp_path, target(), drafter()).warnings)


def test_overrides_win_and_settle_what_was_assumed(tmp_path: Path) -> None:
    assumed = run(tmp_path, target("gemma3"), drafter())
    assert assumed.config.embedding_scale == math.sqrt(HIDDEN)
    assert assumed.config.provenance.embedding_scale_rule == "the target's"
    assert {"--draft-causal", "--embedding-scale"} <= {w for text in assumed.warnings for w in text.split()}
    report = run(tmp_path, target("gemma3"), drafter(), taps_offset=0, draft_causal="all", draft_rows="full",
                 embedding_scale=1.0)
    assert report.config.taps == (2, 4)
    assert (report.config.causal_sliding, report.config.causal_full) == (True, True)
    assert report.config.embedding_scale == 1
    assert report.config.provenance.causality_rule == report.config.provenance.embedding_scale_rule == "as given"
    assert report.warnings == ()
    assert report.overrides.given() == {"taps_offset": 0, "draft_causal": "all", "draft_rows": "full",
                                        "embedding_scale": 1.0}


@pytest.mark.parametrize(("stated", "expected"), [
    ("none", (False, False)), ("swa", (True, False)), ("all", (True, True)), ("auto", (True, False))])
def test_causality_as_given(stated: str, expected: tuple[bool, bool], tmp_path: Path) -> None:
    c = run(tmp_path, target(), drafter(), draft_causal=stated).config
    assert (c.causal_sliding, c.causal_full) == expected


def test_a_key_for_the_embedding_scale_wins_over_the_target(tmp_path: Path) -> None:
    keyed = drafter().with_keys({"dflash.embedding_scale": 2.0})
    assert run(tmp_path, target("gemma3"), keyed).config.embedding_scale == 2
    own = drafter().with_tensors({"token_embd.weight": np.zeros((VOCABULARY, HIDDEN))})
    assert run(tmp_path, target("gemma3"), own).config.embedding_scale == 1


@pytest.mark.parametrize(("stated", "message"), [
    ({"taps_offset": 100}, "--taps-offset is 100; expected 0 or -1"),
    ({"draft_causal": "yes"}, "--draft-causal is 'yes'; expected auto, none, swa, all"),
    ({"draft_rows": "some"}, "--draft-rows is 'some'; expected short, full"),
    ({"embedding_scale": 0.0}, "--embedding-scale is 0.0; expected a positive number"),
    ({"embedding_scale": math.nan}, "--embedding-scale is nan"),
])
def test_overrides_are_checked(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Overrides(**stated)


def tokens(**changes: str) -> list[str]:
    """The tokens with some replaced: `_12="x"`."""
    listed = list(TOKENS)
    for index, text in changes.items():
        listed[int(index[1:])] = text
    return listed


def vocabulary(listed: list[str], types: list[int] | None = None) -> Content:
    """The drafter with these tokens, all used where no types are given."""
    return drafter().with_keys({"tokenizer.ggml.tokens": listed, "tokenizer.ggml.token_type": types})


def test_a_drafter_without_tokenizer_is_accepted(tmp_path: Path) -> None:
    for keys in (dict(TOKENIZER), {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.tokens": ["a", "b"]}):
        file = drafter().with_keys({**keys, "tokenizer.ggml.mask_token_id": MASK})
        report = run(tmp_path, target(), file)
        assert (report.vocabulary, report.mask_token) == (VOCABULARY, "<|mask|>")


def test_other_tokens(tmp_path: Path) -> None:
    message = refusal(tmp_path, target(), vocabulary(tokens(_20="x y", _30="z"), TYPES))
    assert f"token 20 is 'x y' to the drafter and {TOKENS[20]!r} to the target, and 1 more differ" in message


def test_tokens_that_may_differ(tmp_path: Path) -> None:
    """The first special ids, the mask token, and unused padding."""
    spelled = {"_2": "<s>", f"_{MASK}": "<mask>", f"_{VOCABULARY - 1}": "[PAD299]"}
    assert run(tmp_path, target(), vocabulary(tokens(**spelled), TYPES)).vocabulary == VOCABULARY


def test_another_kind_of_tokenizer(tmp_path: Path) -> None:
    file = drafter().with_keys({"tokenizer.ggml.model": "llama"})
    assert "the drafter's tokenizer is 'llama', the target's 'gpt2'" in refusal(tmp_path, target(), file)


def test_settings_of_the_drafters_tokenizer_are_only_compared(tmp_path: Path) -> None:
    file = drafter().with_keys({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.eos_token_id": 7})
    warnings = run(tmp_path, target(), file).warnings
    assert "the pre-tokenizer is 'qwen2' in the target and 'llama-bpe' in the drafter; the target's is used" in warnings
    assert any("the eos token is" in text and "7 in the drafter" in text for text in warnings)


def test_padding_of_unlike_sizes_is_accepted(tmp_path: Path) -> None:
    """151936 rows and 152064 hold the same tokens in some families."""
    longer = [*TOKENS, *(f"<|more_{i}|>" for i in range(128))]
    padded = vocabulary(longer, [*TYPES, *[5] * 128])
    assert run(tmp_path, target(), padded).vocabulary == VOCABULARY
    assert run(tmp_path, target(), vocabulary(TOKENS[:USED], TYPES[:USED])).vocabulary == VOCABULARY
    assert "has 428 tokens, the target 300, of which 275 are used" in refusal(
        tmp_path, target(), vocabulary(longer, [*TYPES, *[1] * 128]))
    assert f"has {USED - 1} tokens, the target 300, of which 275 are used" in refusal(
        tmp_path, target(), vocabulary(TOKENS[:USED - 1], TYPES[:USED - 1]))


@pytest.mark.parametrize(("rows", "shared"), [(USED, USED), (VOCABULARY, 300), (428, 300), (USED - 1, 0), (429, 0)])
def test_rows_of_the_drafters_tables(rows: int, shared: int, tmp_path: Path) -> None:
    """All used tokens of the target, and not more padding than a vocabulary is rounded up by."""
    books = {f"selector_{which}.weight": np.zeros((rows, 32)) for which in ("predecessor", "successor")}
    bare = drafter(2).with_keys(dict(TOKENIZER)).with_keys({"tokenizer.ggml.mask_token_id": MASK}).with_tensors(books)
    if shared:
        assert run(tmp_path, target(), bare).vocabulary == shared
    else:
        assert f"the drafter's tables have {rows} tokens, the target 300, of which 275 are used" in refusal(
            tmp_path, target(), bare)


def test_vocabulary_size_that_the_drafter_states(tmp_path: Path) -> None:
    file = in_every_dialect(1)["D9"].with_keys({"qwen35-dflash-draft.vocab_size": 1000})
    assert "vocab_size says 1000 tokens, the target 300" in refusal(tmp_path, target(), file)


def test_mask_token_outside_the_embedding(tmp_path: Path) -> None:
    file = drafter().with_keys({"tokenizer.ggml.mask_token_id": VOCABULARY})
    assert "the mask token is 300, but the target's embedding has 300 tokens" in refusal(tmp_path, target(), file)
    own = drafter().with_tensors({"token_embd.weight": np.zeros((USED, HIDDEN))})
    file = own.with_keys({"tokenizer.ggml.mask_token_id": USED})
    assert "the mask token is 275, but the drafter's embedding has 275 tokens" in refusal(tmp_path, target(), file)


@pytest.mark.parametrize(("mask", "warning"), [
    (50, f"the mask token 50 is the ordinary token {TOKENS[50]!r} of the target"),
    (int(target().keys["tokenizer.ggml.eot_token_id"]), "is the target's eot token"),
    (USED + 3, None),  # a row of padding, as Qwen 3's drafters use
])
def test_unusual_mask_tokens(mask: int, warning: str | None, tmp_path: Path) -> None:
    file = drafter().with_keys({"tokenizer.ggml.mask_token_id": mask})
    found = [text for text in run(tmp_path, target(), file).warnings if "mask token" in text]
    assert len(found) == (warning is not None)
    assert warning is None or warning in found[0]


@pytest.mark.parametrize(("ids", "message"), [
    ([3, 4, 299], ""), ([3, 4, 300], "d2t names token 300, the target has 300"), ([-1, 4, 5], "d2t names token -1"),
    ([0, 0, 1], "d2t names a token twice; expected the target's ids, not offsets"),
])
def test_map_of_a_reduced_vocabulary(ids: list[int], message: str, tmp_path: Path) -> None:
    file = drafter().with_tensors({"d2t": np.array(ids), "output.weight": np.zeros((3, HIDDEN))})
    if message:
        assert message in refusal(tmp_path, target(), file)
    else:
        assert run(tmp_path, target(), file).config.draft_vocabulary == 3


def test_more_candidates_than_tokens(tmp_path: Path) -> None:
    file = drafter(2).with_keys({"dflash.selector_top_k": 301})
    assert "takes 301 candidates of 300 tokens" in refusal(tmp_path, target(), file)


def test_tensors_that_nothing_reads_are_said(tmp_path: Path) -> None:
    """Once per file, safe to print; factors of the rotary embedding are read with the configuration."""
    extra = {f"extra.{n}\x1b": np.zeros(4) for n in range(5)}
    first = target().with_tensors({**extra, "rope_freqs.weight": np.ones(8)})
    report = run(tmp_path, first, drafter().with_tensors({"more": np.zeros(4), "rope_freqs.weight": np.ones(8)}))
    named = ", ".join(rf"'extra.{n}\x1b'" for n in range(3))
    assert report.notes == (f"5 tensors of the model are not used: {named} and 2 more",
                            "1 tensor of the drafter is not used: 'more'")
    assert run(tmp_path, target("gemma3"), drafter(2)).notes == ()
    with closing(lower(BuildOptions(tmp_path / "target.gguf", "cpu", tmp_path / "out"))) as alone:
        assert alone.notes == []
    first.write(tmp_path / "target.gguf")
    with closing(lower(BuildOptions(tmp_path / "target.gguf", "cpu", tmp_path / "out"))) as alone:
        assert alone.notes == [report.notes[0]]


def test_thinking_and_context_are_warned_of(tmp_path: Path) -> None:
    thinking = target().with_keys({"tokenizer.chat_template": "{% if enable_thinking %}<think>{% endif %}"})
    assert any("trained on thinking" in text for text in run(tmp_path, thinking, drafter()).warnings)
    short = drafter().with_keys({"dflash.context_length": 64})
    (warning,) = (text for text in run(tmp_path, target(), short).warnings if "contexts" in text)
    assert "contexts of 64 tokens, the target for 512" in warning


def test_a_report_to_show_and_to_store(tmp_path: Path) -> None:
    report = run(tmp_path, target(), drafter(2), draft_rows="full")
    stored = json.loads(json.dumps(report.to_json()))
    assert stored["overrides"] == {"taps_offset": None, "draft_causal": "auto", "draft_rows": "full",
                                   "embedding_scale": None}
    assert stored["config"]["taps"] == list(TAPS)
    rows = report.describe()
    assert ("target", "synthetic qwen3 (qwen3, 6 layers, 300 tokens)") in rows
    assert ("mask token", f"{MASK} '<|mask|>'") in rows
    assert ("given", "draft rows full") in rows
    assert all("\n" not in value for _, value in rows)


def test_a_damaged_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "drafter.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(DflashError):
        inspect_drafter(path)
