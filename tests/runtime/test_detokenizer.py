"""Streams of text: whatever the steps, their sum is the whole, and stop strings are never seen."""

from __future__ import annotations

from itertools import pairwise
from typing import AnyStr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashc.runtime.detokenizer import Detokenizer, StopMatcher, TextStream
from dflashc.runtime.errors import RequestError


class Bytes:
    """A tokenizer of 256 byte tokens and one control token."""

    CONTROL = 256

    def piece(self, token: int) -> bytes:
        return b"<control>" if token == self.CONTROL else bytes([token])

    def is_special(self, token: int) -> bool:
        return token == self.CONTROL


class Words:
    """A tokenizer of the texts it is given."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def piece(self, token: int) -> bytes:
        return self._texts[token].encode()

    def is_special(self, token: int) -> bool:
        return False


def split(items: AnyStr, cuts: list[int]) -> list[AnyStr]:
    bounds = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[a:b] for a, b in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 1 << 16), max_size=8)
# Text and pieces of characters in any order: more telling than random bytes.
BYTES = st.lists(
    st.one_of(
        st.binary(max_size=3), st.text(max_size=2).map(str.encode), st.sampled_from([b"\xf0\x9f\x98", b"\xed\xa0\x80"])
    ),
    max_size=8,
).map(b"".join)


@given(BYTES, CUTS)
def test_every_split_gives_the_whole(data: bytes, cuts: list[int]) -> None:
    detokenizer = Detokenizer(Bytes())
    texts = [detokenizer.push(part) for part in split(data, cuts)]
    assert "".join(texts) + detokenizer.flush() == data.decode("utf-8", "replace")


@given(st.text(), CUTS)
def test_no_character_is_split(text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer(Bytes())
    shown = ""
    for part in split(text.encode(), cuts):
        shown += detokenizer.push(part)
        assert text.startswith(shown)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("data", "expected"),
    [  # from the table of U+FFFD substitution of maximal subparts in the Unicode Standard, section 3.9
        (b"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", "\ufffd" * 8 + "A"),
        (b"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", "\ufffd" * 8 + "A"),
        (b"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", "\ufffd" * 5 + "A\ufffd\ufffdB"),
        (b"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", "\ufffd" * 4 + "A"),
    ],
)
def test_replacement_follows_the_unicode_standard(data: bytes, expected: str) -> None:
    detokenizer = Detokenizer(Bytes())
    assert "".join(detokenizer.push((byte,)) for byte in data) == expected


def test_control_tokens_are_hidden_unless_asked_for() -> None:
    ids = [ord("a"), Bytes.CONTROL, ord("b")]
    assert Detokenizer(Bytes()).push(ids) == "ab"
    assert Detokenizer(Bytes(), skip_special=False).push(ids) == "a<control>b"


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that is completed first, by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), CUTS)
def test_stop_strings_in_every_split(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    expected, hit = first_stop(text, stops)
    shown = ""
    for part in split(text, cuts):
        shown += matcher.push(part)
        assert expected.startswith(shown)
    assert (shown + matcher.flush(), matcher.hit) == (expected, hit)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["</s>", "\n\nQ:"])
    assert [matcher.push(part) for part in ("a<", "b\n", "\nQ", "x")] == ["a", "<b", "", "\n\nQx"]
    assert matcher.push("y<") == "y"
    assert (matcher.flush(), matcher.hit) == ("<", None)


def test_a_stop_string_across_tokens_tells_how_many_count() -> None:
    stream = TextStream(Words("one", " st", "op", "ped", " two"), stops=[" stop"])
    first = stream.push([0, 1])
    assert (first.text, first.tokens, first.stop) == ("one", 2, None)
    second = stream.push([2, 3, 4])
    assert (second.text, second.tokens, second.stop) == ("", 1, " stop")
    assert stream.flush().text == ""


def test_a_stop_string_inside_one_token() -> None:
    output = TextStream(Words("a.b", "c"), stops=["."]).push([0, 1])
    assert (output.text, output.tokens, output.stop) == ("a", 1, ".")


def test_flush_shows_what_was_held_back() -> None:
    stream = TextStream(Words("a ST"), stops=["STOP"])
    assert stream.push([0]).text == "a "
    assert stream.flush().text == "ST"


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="empty stop string"):
        StopMatcher(["a", ""])
