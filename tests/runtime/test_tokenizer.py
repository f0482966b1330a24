"""Tokenizers small enough to be followed by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashc.runtime.errors import ArtefactError, RequestError
from dflashc.runtime.subword import from_byte_characters, merge, to_byte_characters
from dflashc.runtime.tokenizer import SETTINGS_FILE, VOCABULARY_FILE, Tokenizer
from tests.runtime.vocabulary import BYTE_LEVEL, SENTENCEPIECE, build


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Tokenizer:
    return build(tmp_path, SENTENCEPIECE).tokenizer()


@pytest.fixture
def byte_level(tmp_path: Path) -> Tokenizer:
    return build(tmp_path, BYTE_LEVEL).tokenizer()


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("abc", ["▁ab", "c"]),  # "ab" (-1) before "bc" (-2) and "▁a" (-3), then "▁ab"
        ("bc", ["▁", "bc"]),
        ("abab", ["▁ab", "ab"]),
        ("a a", ["▁a", "▁a"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("a<tool>b", ["▁a", "<tool>", "▁", "b"]),  # the space is put before every text that follows a special token
    ],
)
def test_sentencepiece_joins_the_best_score_first(sentencepiece: Tokenizer, text: str, expected: list[str]) -> None:
    assert names(sentencepiece, sentencepiece.encode(text, add_special=False)) == expected


def test_sentencepiece_is_no_segmentation_by_total_score(tmp_path: Path) -> None:
    """The best sum (a + bcd, -7) is not what greedy merging reaches (ab + c + d)."""
    tokens = ["a", "b", "c", "d", "ab", "bcd", "<unk>"]
    scores = [-5.0, -5, -5, -5, -1, -2, 0]
    files = build(
        tmp_path,
        {"model": "llama", "tokens": tokens, "scores": scores, "unknown_token_id": 6, "add_space_prefix": False},
    )
    tokenizer = files.tokenizer()
    assert names(tokenizer, tokenizer.encode("abcd", add_special=False)) == ["ab", "c", "d"]


def test_equal_ranks_join_from_the_left() -> None:
    assert merge("aaaaa", lambda left, right: 0 if len(left + right) == 2 else None) == ["aa", "aa", "a"]


def test_words_are_cut_only_where_no_token_reaches_across(tmp_path: Path) -> None:
    """A token such as ">▁<" forbids to cut between ">" and a space."""
    tokens = ["▁", ">", "<", "x", ">▁", ">▁<", "▁<", "<unk>"]
    keys = {"model": "llama", "tokens": tokens, "scores": [-9.0, -9, -9, -9, -1, -2, -3, 0], "unknown_token_id": 7}
    files = build(tmp_path, keys, add_space_prefix=False)
    assert files.settings["joined_before_space"] == ">"
    tokenizer = files.tokenizer()
    assert names(tokenizer, tokenizer.encode("x> < <", add_special=False)) == ["x", ">▁<", "▁<"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ["hell", "o"]),  # no merge makes the token "hello"
        (" hello", ["Ġ", "hell", "o"]),  # "h e" and "he ll" come before "Ġ he"
        (" he he", ["Ġhe", "Ġhe"]),
        ("heé", ["he", "Ã", "©"]),
        ("<think>he", ["<think>", "he"]),
    ],
)
def test_byte_level_merges_in_order(byte_level: Tokenizer, text: str, expected: list[str]) -> None:
    assert names(byte_level, byte_level.encode(text)) == expected


def test_llama3_takes_a_word_that_is_a_token_as_it_is(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, BYTE_LEVEL, pre="llama-bpe", add_bos_token=False).tokenizer()
    assert names(tokenizer, tokenizer.encode("hello")) == ["hello"]


def test_begin_and_end_tokens(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, SENTENCEPIECE, add_eos_token=True).tokenizer()
    assert names(tokenizer, tokenizer.encode("a")) == ["<s>", "▁a", "</s>"]
    assert names(tokenizer, tokenizer.encode("")) == ["<s>", "</s>"]
    assert names(tokenizer, tokenizer.encode("a", add_special=False)) == ["▁a"]


def test_control_tokens_are_read_only_when_asked_for(byte_level: Tokenizer) -> None:
    text = "<|im_start|>he<|im_end|><think>"
    assert names(byte_level, byte_level.encode(text, parse_special=True)) == [
        *("<|im_start|>", "he", "<|im_end|>", "<think>"),
    ]
    plain = byte_level.encode(text)
    assert names(byte_level, plain)[-1] == "<think>"
    assert not any(map(byte_level.is_special, plain))
    assert byte_level.decode(plain) == text


def test_the_longest_special_token_wins(tmp_path: Path) -> None:
    """As in llama.cpp: "bcd" is taken out before "ab", though "ab" begins earlier."""
    keys = {**BYTE_LEVEL, "tokens": [*BYTE_LEVEL["tokens"], "ab", "bcd"]}
    tokenizer = build(tmp_path, keys, token_type=[*BYTE_LEVEL["token_type"], 4, 4]).tokenizer()
    assert names(tokenizer, tokenizer.encode("abcdab")) == ["a", "bcd", "ab"]


def test_decode_hides_control_tokens_unless_asked(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>hello<think>", parse_special=True)
    assert byte_level.decode(ids) == "hello<think>"
    assert byte_level.decode(ids, skip_special=False) == "<|im_start|>hello<think>"


def test_pieces_are_bytes(sentencepiece: Tokenizer, byte_level: Tokenizer) -> None:
    assert sentencepiece.piece(10) == b" ab"
    assert sentencepiece.piece(13 + 0xC3) == b"\xc3"
    assert sentencepiece.piece(2) == b"</s>"
    assert byte_level.piece(BYTE_LEVEL["tokens"].index("Ġhe")) == b" he"
    for outside in (-1, byte_level.vocab_size):
        with pytest.raises(RequestError, match=f"token id {outside} is outside of 0 .. 263"):
            byte_level.piece(outside)


@given(st.text())
def test_byte_characters_can_be_undone(text: str) -> None:
    assert from_byte_characters(to_byte_characters(text)) == text.encode()


def test_texts_come_back(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    @given(st.text())
    def check(text: str) -> None:
        assert byte_level.decode(byte_level.encode(text)) == text
        if text:
            spaced = sentencepiece.decode(sentencepiece.encode(text))
            assert spaced.replace(" ", "") == text.replace(" ", "").replace("▁", "")

    check()


def test_a_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 2 is half of a surrogate pair"):
        byte_level.encode("ab\ud800")


def test_files_hold_the_whole_tokenizer(tmp_path: Path) -> None:
    files = build(tmp_path, BYTE_LEVEL, **{"tokenizer.chat_template": "{{ messages }}"})
    files.write(tmp_path / "tokenizer")
    loaded = Tokenizer.load(tmp_path / "tokenizer")
    text = "hello é <|im_end|> <think>"
    assert loaded.encode(text) == files.tokenizer().encode(text)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (264, None, 262)
    assert loaded.end_of_generation_ids == {262}
    assert loaded.chat_templates == {"default": "{{ messages }}"}


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=SETTINGS_FILE):
        Tokenizer.load(tmp_path)
    build(tmp_path, BYTE_LEVEL).write(tmp_path)
    (tmp_path / VOCABULARY_FILE).write_text("[1, 2")
    with pytest.raises(ArtefactError, match="damaged"):
        Tokenizer.load(tmp_path)


def test_decoding_needs_no_encoder() -> None:
    code = "import sys, dflashc.runtime.tokenizer; print({'tokenizers', 'tvm', 'jinja2', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
