"""The tokenizer of a GGUF file, checked and written as the artefact's tokenizer folder.

Owns the meaning of the `tokenizer.*` keys. Knows nothing of how text is encoded (`dflashc.runtime.subword`).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashc.compiler.gguf.getters import TypedGetters
from dflashc.compiler.pretokenizers import PRE_TOKENIZERS
from dflashc.runtime.errors import BuildError, GgufError
from dflashc.runtime.subword import BYTE_CHARACTERS, SPACE
from dflashc.runtime.tokenizer import SETTINGS_FILE, VOCABULARY_FILE, Tokenizer, TokenType

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_TEMPLATE_KEY = "tokenizer.chat_template"
_TOKEN_TYPES = frozenset(map(int, TokenType))

# Tokens that end a text, a turn or a message, whatever the file says of them; the list is llama.cpp's.
_ENDS_GENERATION = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "[e~[",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    }
)
# Models that do not end with it keep it as text: in HTML it closes a stroke.
_HTML_LOOKALIKE = "</s>"
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


@dataclass(frozen=True)
class TokenizerFiles:
    """What the runtime loads.

    Attributes
    ----------
    settings : small and readable: ids of special tokens, how to cut and merge, chat templates.
    vocabulary : the long lists: token texts, their types (a digit each), scores or merges.
    """

    settings: dict[str, Any]
    vocabulary: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the tokenizer folder that `dflashc.runtime.tokenizer.Tokenizer.load` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(self.settings, ensure_ascii=False, indent=1)
        vocabulary = json.dumps(self.vocabulary, ensure_ascii=False, separators=(",", ":"))
        (folder / SETTINGS_FILE).write_text(settings, encoding="utf-8")
        (folder / VOCABULARY_FILE).write_text(vocabulary, encoding="utf-8")

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer without going through files."""
        return Tokenizer(self.settings, self.vocabulary)


def build_tokenizer(gguf: TypedGetters) -> TokenizerFiles:
    """Read and check the tokenizer of a GGUF file.

    Raises
    ------
    GgufError
        A key is missing, of a wrong type, or contradicts another; the message names it.
    BuildError
        The kind of tokenizer is not supported; the message lists those that are.
    """
    tokens = _tokens(gguf)
    types = _types(gguf, tokens)
    model = gguf.get_str(_key("model"))
    if model == "llama":
        settings, lists = _sentencepiece(gguf, tokens, types)
    elif model == "gpt2":
        settings, lists = _byte_level(gguf, tokens, types)
    else:
        raise BuildError(f"{_key('model')} is {model!r}; supported are 'llama' (SentencePiece) and 'gpt2' (byte-level)")
    ends = _end_of_generation(gguf, tokens, types)
    settings |= {
        "eot_id": _id(gguf, "eot", len(tokens)),
        "padding_id": _id(gguf, "padding", len(tokens)),
        "mask_id": _id(gguf, "mask", len(tokens)),
        "end_of_generation_ids": sorted(ends),
        "chat_templates": _chat_templates(gguf),
    }
    for name in ("bos", "eos"):
        if settings[f"add_{name}"] and settings[f"{name}_id"] is None:
            raise GgufError(f"{_key(f'add_{name}_token')} is true, but {_id_key(name)} is missing")
    return TokenizerFiles(settings, {"tokens": tokens, "types": "".join(map(str, types)), **lists})


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def _id_key(name: str) -> str:
    return _key(f"{name}_token_id")


def _id(gguf: TypedGetters, name: str, vocab_size: int, default: int | None = None) -> int | None:
    token = gguf.get_int(_id_key(name), default)
    if token is not None and not 0 <= token < vocab_size:
        raise GgufError(f"{_id_key(name)} is {token}, but the vocabulary has {vocab_size} tokens")
    return token


def _tokens(gguf: TypedGetters) -> list[str]:
    tokens = gguf.get_strings(_key("tokens"))
    if not tokens:
        raise GgufError(f"{_key('tokens')} is empty, expected one text per token")
    named = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    first: dict[str, int] = {}
    for i, text in enumerate(named):
        if first.setdefault(text, i) != i:
            raise GgufError(
                f"{_key('tokens')}: tokens {first[text]} and {i} are both {text!r}, expected distinct texts"
            )
    return named


def _types(gguf: TypedGetters, tokens: list[str]) -> list[int]:
    """One `TokenType` per token; those that end an answer always count as control tokens."""
    types = gguf.get_ints(_key("token_type"), None) or [int(TokenType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise GgufError(
            f"{_key('token_type')} has {len(types)} items, {_key('tokens')} {len(tokens)}; expected as many"
        )
    for i, (kind, text) in enumerate(zip(types, tokens, strict=True)):
        if kind not in _TOKEN_TYPES:
            raise GgufError(f"{_key('token_type')}[{i}] is {kind}, expected {min(TokenType)} to {max(TokenType)}")
        if kind == TokenType.BYTE and not _BYTE_TOKEN.fullmatch(text):
            raise GgufError(f"token {i} has the byte type, but its text is {text!r}, expected '<0x00>' to '<0xFF>'")
        if kind == TokenType.USER_DEFINED and text in _ENDS_GENERATION and text != _HTML_LOOKALIKE:
            types[i] = int(TokenType.CONTROL)
    return types


def _sentencepiece(gguf: TypedGetters, tokens: list[str], types: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    scores = gguf.get_floats(_key("scores"))
    if len(scores) != len(tokens):
        raise GgufError(f"{_key('scores')} has {len(scores)} items, {_key('tokens')} {len(tokens)}; expected as many")
    if not all(map(math.isfinite, scores)):
        raise GgufError(f"{_key('scores')} holds a number that is not finite; the file is damaged")
    # The ids SentencePiece itself gives when the file names none.
    unknown = _id(gguf, "unknown", len(tokens), 0)
    spelled = {text: i for i, text in enumerate(tokens) if _BYTE_TOKEN.fullmatch(text)}
    before_space = {c for text in tokens for c in re.findall(f"(.)(?={SPACE})", text, re.DOTALL)}
    settings = {
        "model": "sentencepiece",
        "bos_id": _id(gguf, "bos", len(tokens), 1),
        "eos_id": _id(gguf, "eos", len(tokens), 2),
        "unknown_id": unknown,
        "add_bos": gguf.get_bool(_key("add_bos_token"), True),
        "add_eos": gguf.get_bool(_key("add_eos_token"), False),
        "add_space_prefix": gguf.get_bool(_key("add_space_prefix"), True),
        "byte_ids": [spelled.get(f"<0x{byte:02X}>", unknown) for byte in range(256)],
        "joined_before_space": "".join(sorted(before_space)),
    }
    return settings, {"scores": scores}


def _byte_level(gguf: TypedGetters, tokens: list[str], types: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    name = gguf.get_str(_key("pre"), "default")
    if name not in PRE_TOKENIZERS:
        raise BuildError(f"{_key('pre')} is {name!r}; supported are {', '.join(PRE_TOKENIZERS)}")
    rule = PRE_TOKENIZERS[name]
    settings = {
        "model": "byte-level",
        "bos_id": _id(gguf, "bos", len(tokens)),
        "eos_id": _id(gguf, "eos", len(tokens)),
        "unknown_id": _id(gguf, "unknown", len(tokens)),
        "add_bos": gguf.get_bool(_key("add_bos_token"), rule.add_bos),
        "add_eos": gguf.get_bool(_key("add_eos_token"), False),
        "add_space_prefix": gguf.get_bool(_key("add_space_prefix"), False),
        "split_patterns": list(rule.split_patterns),
        "ignore_merges": rule.ignore_merges,
    }
    return settings, {"merges": _merges(gguf, tokens)}


def _merges(gguf: TypedGetters, tokens: list[str]) -> list[str]:
    merges = gguf.get_strings(_key("merges"))
    known = {*tokens, *BYTE_CHARACTERS}
    for i, pair in enumerate(merges):
        left, _, right = pair.partition(" ")
        if not left or not right or " " in right:
            raise GgufError(f"{_key('merges')}[{i}] is {pair!r}, expected two parts with one space between them")
        if not known.issuperset((left, right, left + right)):
            raise GgufError(f"{_key('merges')}[{i}] is {pair!r}, but its parts or their union are no tokens")
    return list(dict.fromkeys(merges))


def _end_of_generation(gguf: TypedGetters, tokens: list[str], types: list[int]) -> set[int]:
    ends = {i for i, text in enumerate(tokens) if types[i] == TokenType.CONTROL and text in _ENDS_GENERATION}
    names = {tokens[i]: i for i in ends}
    if {"<|call|>", "<|return|>"} <= names.keys():
        ends.discard(names.get("<|end|>", -1))  # in the Harmony format it separates messages of one answer
    return ends | {i for name in _END_KEYS if (i := _id(gguf, name, len(tokens))) is not None}


def _chat_templates(gguf: TypedGetters) -> dict[str, str]:
    templates = {
        name: gguf.get_str(f"{_TEMPLATE_KEY}.{name}") for name in gguf.get_strings("tokenizer.chat_templates", [])
    }
    if _TEMPLATE_KEY in gguf.metadata:
        templates["default"] = gguf.get_str(_TEMPLATE_KEY)
    return templates
