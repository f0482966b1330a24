"""Tokenizer metadata that contradicts itself is refused, and the message names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflashc.runtime.errors import BuildError, GgufError
from tests.runtime.vocabulary import BYTE_LEVEL, SENTENCEPIECE, build

N_SP, N_BL = len(SENTENCEPIECE["tokens"]), len(BYTE_LEVEL["tokens"])


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        (SENTENCEPIECE, {"tokens": None}, "tokenizer.ggml.tokens"),
        (SENTENCEPIECE, {"tokens": []}, "tokenizer.ggml.tokens is empty"),
        (SENTENCEPIECE, {"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        (SENTENCEPIECE, {"tokens": ["a"] * N_SP}, "tokens 0 and 1 are both 'a'"),
        (SENTENCEPIECE, {"scores": None}, "tokenizer.ggml.scores"),
        (SENTENCEPIECE, {"scores": [0.0]}, f"tokenizer.ggml.scores has 1 items, tokenizer.ggml.tokens {N_SP}"),
        (SENTENCEPIECE, {"scores": [float("nan")] * N_SP}, "tokenizer.ggml.scores holds a number that is not finite"),
        (SENTENCEPIECE, {"token_type": [1]}, "tokenizer.ggml.token_type has 1 items"),
        (SENTENCEPIECE, {"token_type": [7] * N_SP}, r"tokenizer.ggml.token_type\[0\] is 7, expected 1 to 6"),
        (SENTENCEPIECE, {"token_type": [6] * N_SP}, "token 0 has the byte type, but its text is '<unk>'"),
        (SENTENCEPIECE, {"bos_token_id": N_SP}, f"bos_token_id is {N_SP}, but the vocabulary has {N_SP} tokens"),
        (SENTENCEPIECE, {"eot_token_id": 2**31}, "eot_token_id"),
        (SENTENCEPIECE, {"add_bos_token": 1}, "add_bos_token"),
        (BYTE_LEVEL, {"merges": None}, "tokenizer.ggml.merges"),
        (BYTE_LEVEL, {"merges": ["he"]}, r"tokenizer.ggml.merges\[0\] is 'he', expected two parts"),
        (BYTE_LEVEL, {"merges": ["h e", "a  b"]}, r"tokenizer.ggml.merges\[1\]"),
        (BYTE_LEVEL, {"merges": [" he"]}, r"tokenizer.ggml.merges\[0\]"),
        (BYTE_LEVEL, {"merges": ["q q"]}, "no tokens"),
        (BYTE_LEVEL, {"add_bos_token": True}, "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"),
        (BYTE_LEVEL, {"tokenizer.chat_template": 3}, "tokenizer.chat_template"),
    ],
)
def test_contradictions(tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message) as caught:
        build(tmp_path, keys, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        (SENTENCEPIECE, {"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are 'llama'"),
        (BYTE_LEVEL, {"pre": "poro-chat"}, "tokenizer.ggml.pre is 'poro-chat'; supported are .*gpt-2.*qwen2"),
    ],
)
def test_unsupported_kinds_list_the_supported(
    tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        build(tmp_path, keys, **changes)


def test_a_token_without_text_gets_a_name(tmp_path: Path) -> None:
    keys = {**BYTE_LEVEL, "tokens": [*BYTE_LEVEL["tokens"][:-1], ""]}
    assert build(tmp_path, keys).vocabulary["tokens"][-1] == f"[EMPTY_{N_BL - 1}]"


def test_ends_of_generation(tmp_path: Path) -> None:
    """Tokens that end a turn count, and are control tokens, even when the file calls them user-defined."""
    types = [*BYTE_LEVEL["token_type"][:-2], 4, 4]
    tokenizer = build(tmp_path, BYTE_LEVEL, token_type=types, eos_token_id=0, eot_token_id=1).tokenizer()
    assert tokenizer.end_of_generation_ids == {0, 1, N_BL - 2}
    assert tokenizer.is_special(N_BL - 2)


def test_a_stroke_in_html_ends_nothing_unless_the_file_says_so(tmp_path: Path) -> None:
    keys = {**BYTE_LEVEL, "tokens": [*BYTE_LEVEL["tokens"], "</s>"]}
    written = build(tmp_path, keys, token_type=[*BYTE_LEVEL["token_type"], 4]).tokenizer()
    assert N_BL not in written.end_of_generation_ids
    assert written.encode("</s>") == [N_BL]
    control = build(tmp_path, keys, token_type=[*BYTE_LEVEL["token_type"], 3]).tokenizer()
    assert N_BL in control.end_of_generation_ids


def test_an_ordinary_token_that_looks_like_an_end_is_text(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, BYTE_LEVEL, token_type=[1] * N_BL, eos_token_id=0).tokenizer()
    assert tokenizer.end_of_generation_ids == {0}


def test_named_chat_templates(tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "one",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "two",
    }
    assert build(tmp_path, BYTE_LEVEL, **templates).settings["chat_templates"] == {"default": "one", "tool_use": "two"}
