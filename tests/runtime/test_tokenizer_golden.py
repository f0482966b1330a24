"""Token ids against llama.cpp: the example model, the real model, and public vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.tokenizer import build_tokenizer
from dflashc.runtime.tokenizer import Tokenizer
from tests.realmodel import SHA256, gemma3_path
from tests.reference.shared import shared
from tests.runtime.vocabulary import example_model

DATA = Path(__file__).parents[1] / "data"
VOCABULARIES = ["deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "phi-3", "refact", "starcoder"]


def tokenizer_of(path: Path) -> Tokenizer:
    with open_gguf(path) as gguf:
        return build_tokenizer(gguf).tokenizer()


def check(tokenizer: Tokenizer, cases: list[dict[str, Any]]) -> None:
    assert len(cases) == 186  # 62 texts, three ways each
    for case in cases:
        ids = tokenizer.encode(case["text"], add_special=case["add_special"], parse_special=case["parse_special"])
        assert ids == case["ids"], case


def test_example_model() -> None:
    tokenizer = tokenizer_of(example_model())
    check(tokenizer, json.loads((DATA / "tokenize-pycode-3m.json").read_text())["tokenize"])
    assert tokenizer.end_of_generation_ids == {0, 2}
    assert tokenizer.mask_id in (3, None)


@pytest.mark.realmodel
def test_real_model(tmp_path: Path) -> None:
    golden = json.loads((DATA / "tokenize-gemma3-270m.json").read_text())
    assert golden["model_sha256"] == SHA256
    with open_gguf(gemma3_path()) as gguf:
        build_tokenizer(gguf).write(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    check(tokenizer, golden["tokenize"])
    assert tokenizer.end_of_generation_ids == {1, 106}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_public_vocabularies(name: str) -> None:
    path = shared(f"golden/vocab/ggml-vocab-{name}.gguf")
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [list(map(int, line.split())) for line in Path(f"{path}.out").read_text().split("\n")]
    tokenizer = tokenizer_of(path)
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids).lstrip(" ") == text.lstrip(" ")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        (
            "llama-bpe",
            "I'LL pay 1234567 €!\n\n  now",
            ["I", "'LL", " pay", " ", "123", "456", "7", " €!\n\n", " ", " now"],
        ),
        ("qwen2", "I'll pay 12\r\n  now", ["I", "'ll", " pay", " ", "1", "2", "\r\n", " ", " now"]),
        ("qwen35", "ते 12", ["ते", " ", "1", "2"]),
        ("qwen2", "ते", ["त", "े"]),
        ("gpt-4o", "HelloWorld's 1234 a/b\n", ["Hello", "World's", " ", "123", "4", " a", "/b", "\n"]),
        ("default", "a 1234, b", ["a", " ", "123", "4", ",", " b"]),
    ],
)
def test_words(pre: str, text: str, words: list[str]) -> None:
    """What the published expressions say, worked out by hand."""
    from tokenizers import Regex, pre_tokenizers

    from dflashc.compiler.pretokenizers import PRE_TOKENIZERS

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].split_patterns]
    assert [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == words
