"""Text to token ids and back, from the tokenizer folder of an artefact.

Owns special tokens, begin and end tokens, and the bytes of each token. Knows nothing of GGUF, of chat templates,
or of how the subwords between special tokens are merged (`subword`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from dflashc.runtime.errors import ArtefactError, RequestError
from dflashc.runtime.subword import SPACE, ByteLevel, SentencePiece, from_byte_characters

SETTINGS_FILE = "tokenizer.json"
VOCABULARY_FILE = "vocabulary.json"


class TokenType(IntEnum):
    """What a token is for; the numbers are those of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Tokenizer:
    """A vocabulary with its special tokens.

    Attributes
    ----------
    vocab_size : number of tokens.
    bos_id, eos_id, mask_id : the begin, end and mask tokens, None where the model has none.
    end_of_generation_ids : every token that ends an answer: end of text, of turn, of message.
    chat_templates : Jinja sources by name; the usual one is called "default".
    """

    def __init__(self, settings: dict[str, Any], vocabulary: dict[str, Any]) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._tokens: list[str] = vocabulary["tokens"]
        self._types: str = vocabulary["types"]
        self._byte_level: bool = settings["model"] == "byte-level"
        self.vocab_size = len(self._tokens)
        self.bos_id: int | None = settings["bos_id"]
        self.eos_id: int | None = settings["eos_id"]
        self.mask_id: int | None = settings["mask_id"]
        self.end_of_generation_ids: frozenset[int] = frozenset(settings["end_of_generation_ids"])
        self.chat_templates: dict[str, str] = settings["chat_templates"]

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read the tokenizer folder `path` that the compiler wrote.

        Raises
        ------
        ArtefactError
            A file is missing or damaged.
        """
        try:
            settings = json.loads((path / SETTINGS_FILE).read_bytes())
            vocabulary = json.loads((path / VOCABULARY_FILE).read_bytes())
            return cls(settings, vocabulary)
        except OSError as error:
            raise ArtefactError(f"{error.filename} cannot be read: {error.strerror}; build again") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ArtefactError(f"{path}: the tokenizer files are damaged ({error!r}); build again") from error

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of `text`.

        Parameters
        ----------
        add_special : put the begin and end tokens around the ids, where the model wants them.
        parse_special : read control tokens (such as `<|im_end|>`) written in the text as what they name; else
            they are ordinary characters. User-defined tokens are always read.

        Raises
        ------
        RequestError
            `text` holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"text: character {error.start} is half of a surrogate pair, no Unicode") from error
        ids = [self.bos_id] if add_special and self._settings["add_bos"] and self.bos_id is not None else []
        after_special = True
        for fragment in self._partition(text, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                prefix = " " if after_special and self._settings["add_space_prefix"] else ""
                ids += self._model.encode(prefix + fragment)
            after_special = isinstance(fragment, int)
        if add_special and self._settings["add_eos"] and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`: their bytes joined, each ill-formed sequence replaced by U+FFFD.

        The space that some models put before a text is part of it. `skip_special` leaves out control tokens.
        """
        pieces = (self.piece(i) for i in ids if not (skip_special and self.is_special(i)))
        return b"".join(pieces).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """Return the bytes token `token` stands for, control tokens by their name.

        Raises
        ------
        RequestError
            There is no such token.
        """
        if not 0 <= token < self.vocab_size:
            raise RequestError(f"token id {token} is outside of 0 .. {self.vocab_size - 1}")
        text = self._tokens[token]
        match self._type(token):
            case TokenType.NORMAL if self._byte_level:
                return from_byte_characters(text)
            case TokenType.NORMAL:
                return text.replace(SPACE, " ").encode("utf-8")
            case TokenType.BYTE:
                return bytes.fromhex(text[3:5])
            case TokenType.UNUSED:
                return b""
            case _:
                return text.encode("utf-8")

    def is_special(self, token: int) -> bool:
        """Whether token `token` steers the model and is not part of the text."""
        return self._type(token) in (TokenType.CONTROL, TokenType.UNKNOWN)

    def token_text(self, token: int | None) -> str:
        """Return the name of a special token as chat templates want it: empty for None."""
        return "" if token is None else self._tokens[token]

    def _type(self, token: int) -> int:
        return ord(self._types[token]) - ord("0")

    @cached_property
    def _model(self) -> SentencePiece | ByteLevel:
        ids = dict(zip(self._tokens, range(self.vocab_size), strict=True))
        if self._byte_level:
            return ByteLevel(
                ids, self._vocabulary["merges"], self._settings["split_patterns"], self._settings["ignore_merges"]
            )
        return SentencePiece(
            ids, self._vocabulary["scores"], self._settings["byte_ids"], self._settings["joined_before_space"]
        )

    @cached_property
    def _specials(self) -> list[tuple[str, int, bool]]:
        """Text, id and whether it is a control token, the longest text first."""
        marked = [i for i in range(self.vocab_size) if self._types[i] in "234"]
        marked.sort(key=lambda i: -len(self._tokens[i].encode("utf-8")))
        return [(self._tokens[i], i, self.is_special(i)) for i in marked]

    def _partition(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut the special tokens out of `text`: the longest wins wherever it stands, as in llama.cpp."""
        fragments: list[str | int] = [text] if text else []
        for special, token, control in self._specials:
            if (control and not parse_special) or special not in text:
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                first, *others = fragment.split(special)
                cut += [first] if first else []
                for other in others:
                    cut += [token, other] if other else [token]
            fragments = cut
        return fragments
