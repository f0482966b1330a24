"""Text to subwords by merging neighbours: SentencePiece with scores, and byte-level byte pair encoding.

Owns the merge loop and the two orders of merging. Knows nothing of special tokens, settings or files.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a space inside a token."""

_CACHED_WORDS = 1 << 16
_CACHED_WORD_LENGTH = 64


def _byte_characters() -> list[str]:
    """The character that byte-level vocabularies (GPT-2 and its heirs) write for each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
_TO_BYTE_CHARACTERS = dict(enumerate(BYTE_CHARACTERS))


def to_byte_characters(text: str) -> str:
    """Write the UTF-8 bytes of `text` in the alphabet of a byte-level vocabulary."""
    return text.encode("utf-8").decode("latin-1").translate(_TO_BYTE_CHARACTERS)


def from_byte_characters(token: str) -> bytes:
    """Return the bytes a byte-level token stands for; a character outside the alphabet stands for itself."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:
        return b"".join(
            bytes((_BYTE_OF_CHARACTER[c],)) if c in _BYTE_OF_CHARACTER else c.encode("utf-8") for c in token
        )


def merge(symbols: Sequence[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Join neighbouring symbols until no pair has a rank: lowest rank first, leftmost first among equals.

    Parameters
    ----------
    symbols : the text, one character each.
    rank : the rank of a (left, right) pair, None for a pair that is never joined.
    """
    parts: list[str] = list(symbols)
    following = list(range(1, len(parts) + 1))
    preceding = list(range(-1, len(parts) - 1))
    queue: list[tuple[float, int, int, int]] = []

    def push(left: int, right: int) -> None:
        pair_rank = rank(parts[left], parts[right])
        if pair_rank is not None:
            heapq.heappush(queue, (pair_rank, left, right, len(parts[left]) + len(parts[right])))

    for left in range(len(parts) - 1):
        push(left, left + 1)
    while queue:
        _, left, right, length = heapq.heappop(queue)
        # A part only ever grows, or is emptied into its left neighbour: the same length means the same pair.
        if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != length:
            continue
        parts[left] += parts[right]
        parts[right] = ""
        beyond = following[left] = following[right]
        if beyond < len(parts):
            preceding[beyond] = left
            push(left, beyond)
        if preceding[left] >= 0:
            push(preceding[left], left)
    return [part for part in parts if part]


class SentencePiece:
    """SentencePiece's byte pair encoding: of all neighbours that join to a token, the best-scored token first.

    Parameters
    ----------
    ids : token text to id.
    scores : one per id; higher is joined earlier.
    byte_ids : the 256 ids that spell a character the vocabulary lacks, byte by byte.
    joined_before_space : every character that stands directly before a space inside some token. No merge can
        reach across a space that follows any other character, so texts are cut there and words remembered.
    """

    def __init__(
        self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int], joined_before_space: str
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        before = f"(?<![{re.escape(joined_before_space)}])" if joined_before_space else ""
        self._cut = re.compile(f"{before}(?={SPACE})")
        self._remembered = lru_cache(_CACHED_WORDS)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, a stretch without special tokens."""
        ids: list[int] = []
        for word in self._cut.split(text.replace(" ", SPACE)):
            ids += self._remembered(word) if len(word) <= _CACHED_WORD_LENGTH else self._encode_word(word)
        return ids

    def _rank(self, left: str, right: str) -> float | None:
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for part in merge(word, self._rank):
            token = self._ids.get(part)
            ids += [token] if token is not None else [self._byte_ids[byte] for byte in part.encode("utf-8")]
        return ids


class ByteLevel:
    """Byte pair encoding over bytes, inside words that regular expressions cut out, in the order of a merge list.

    Parameters
    ----------
    ids : token text to id, written in `BYTE_CHARACTERS`.
    merges : `"left right"`, the earliest first.
    split_patterns : regular expressions (Oniguruma) applied one after the other; the matches and the stretches
        between them become words.
    ignore_merges : a word that is a token as a whole is that token, whatever the merges say (as Llama 3 asks).
    """

    def __init__(
        self, ids: Mapping[str, int], merges: Iterable[str], split_patterns: Iterable[str], ignore_merges: bool
    ) -> None:
        from tokenizers import Regex, pre_tokenizers

        self._ids = ids
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._ignore_merges = ignore_merges
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split_patterns]
        self._words = pre_tokenizers.Sequence(splits)
        self._remembered = lru_cache(_CACHED_WORDS)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, a stretch without special tokens; bytes the vocabulary lacks are left out."""
        ids: list[int] = []
        for word, _ in self._words.pre_tokenize_str(text):
            ids += self._remembered(word) if len(word) <= _CACHED_WORD_LENGTH else self._encode_word(word)
        return ids

    def _rank(self, left: str, right: str) -> float | None:
        return self._ranks.get(f"{left} {right}")

    def _encode_word(self, word: str) -> list[int]:
        spelled = to_byte_characters(word)
        if self._ignore_merges and spelled in self._ids:
            return [self._ids[spelled]]
        return [self._ids[part] for part in merge(spelled, self._rank) if part in self._ids]
