"""Token ids to text as they arrive, and stop strings found in it.

Owns what may be shown when: never a part of a character, never text that may yet turn out to belong to a stop
string. Knows nothing of how tokens are chosen.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflashc.runtime.errors import RequestError


class Pieces(Protocol):
    """The part of a tokenizer that is needed here."""

    def piece(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class Detokenizer:
    """Turns ids into text piece by piece; all texts joined, with that of `flush`, equal the whole decoded at once.

    Ill-formed bytes become U+FFFD, one for each maximal part of a character (the Unicode Standard, section 3.9).

    Parameters
    ----------
    tokenizer : gives the bytes of a token.
    skip_special : leave out control tokens.
    """

    def __init__(self, tokenizer: Pieces, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; bytes of an unfinished character wait for the next call."""
        shown = (i for i in ids if not (self._skip_special and self._tokenizer.is_special(i)))
        return self._decoder.decode(b"".join(map(self._tokenizer.piece, shown)))

    def flush(self) -> str:
        """End the text: return U+FFFD for a character that was never finished, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one.

    The first stop string is the one completed first, and of those completed at once the longest; how the text is
    split into calls makes no difference.

    Parameters
    ----------
    stops : the stop strings.

    Attributes
    ----------
    hit : the stop string found, None as long as there is none.

    Raises
    ------
    RequestError
        A stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise RequestError("stop: an empty stop string was given, expected one character or more in each")
        self._stops = stops
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Return the text that may be shown now. After a hit there is none."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start]
        kept = self._possible_start(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """End the text: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True)
class Output:
    """What one step of generation shows.

    Attributes
    ----------
    text : to be shown now.
    tokens : how many of the step's ids count: all, or those up to the one that completed a stop string.
    stop : the stop string found, which is not part of any text.
    """

    text: str
    tokens: int
    stop: str | None


class TextStream:
    """Ids in, text out: a `Detokenizer` with a `StopMatcher` behind it."""

    def __init__(self, tokenizer: Pieces, stops: Sequence[str] = (), *, skip_special: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._matcher = StopMatcher(stops)

    def push(self, ids: Sequence[int]) -> Output:
        """Take the ids of one step, one or many; those behind a stop string are not looked at."""
        texts: list[str] = []
        for count, token in enumerate(ids, 1):
            texts.append(self._matcher.push(self._detokenizer.push((token,))))
            if self._matcher.hit is not None:
                return Output("".join(texts), count, self._matcher.hit)
        return Output("".join(texts), len(ids), None)

    def flush(self) -> Output:
        """End the text. The replacement of an unfinished character can still complete a stop string."""
        text = self._matcher.push(self._detokenizer.flush())
        return Output(text + self._matcher.flush(), 0, self._matcher.hit)
