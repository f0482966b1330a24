"""Rings against caches that write down who stored what: what is said to be there is, and no more is run again."""

from __future__ import annotations

import numpy as np
import pytest

from dflashc.runtime.plan import Buffer
from dflashc.runtime.rings import Ring, Rings


class Cache:
    """Slots with the position and the text that each was last stored for."""

    def __init__(self, window: int, slots: int) -> None:
        self.window, self.slots = window, slots
        self._stored: dict[int, tuple[int, tuple[int, ...]]] = {}

    def store(self, text: list[int], start: int, count: int) -> None:
        for position in range(start, start + count):
            self._stored[position % self.slots] = (position, tuple(text[: position + 1]))

    def shows(self, text: list[int], length: int) -> bool:
        """Whether the row behind `length` tokens finds all of its window, of this text."""
        first = max(0, length - self.window + 1)
        return all(self._stored.get(p % self.slots) == (p, tuple(text[: p + 1])) for p in range(first, length))


class Sequence:
    """What a session does with its rings: runs that store rows, some of them rejected, and rewinds."""

    def __init__(self, target: list[tuple[int, int]], drafter: list[tuple[int, int]]) -> None:
        self.rings = Rings([Ring(*r) for r in target], [Ring(*r) for r in drafter])
        self.target, self.drafter = ([Cache(*r) for r in rings] for rings in (target, drafter))
        self.text: list[int] = []

    def run(self, text: list[int], start: int, rejected: int = 0) -> None:
        """Run `text` from `start` on, in chunks; the last `rejected` rows are forgotten again."""
        for position in range(start, len(text), 5):
            count = min(5, len(text) - position)
            for cache in self.target:
                assert cache.shows(text, position)
            for cache in (*self.target, *self.drafter):
                cache.store(text, position, count)
            self.rings.store(position, count)
        self.text = text[: len(text) - rejected]


@pytest.mark.parametrize(("target", "drafter"), [
    ([(4, 13)], []), ([], [(4, 13)]), ([(4, 13)], [(7, 20)]), ([], [(1, 5), (4, 13)]), ([(4, 13), (7, 20)], [(7, 20)])])
def test_what_is_there_is_used_and_what_is_lost_is_run_again(target: list[tuple[int, int]],
                                                              drafter: list[tuple[int, int]]) -> None:
    """Prompts that share a beginning with the text, and rows that are rejected: as the caches' own record says."""
    random = np.random.default_rng(len(target) + 3 * len(drafter))
    sequence = Sequence(target, drafter)
    again = reused = 0
    for step in range(3000):
        if len(sequence.text) > 90:
            sequence.text = sequence.text[: int(random.integers(0, 90))]
        shared = int(random.integers(0, len(sequence.text) + 1)) if random.random() < 0.4 else len(sequence.text)
        text = sequence.text[:shared] + [step] * int(random.integers(1, 6))
        start = sequence.rings.resume(shared, len(text))
        assert 0 <= start <= shared
        if all(cache.shows(text, shared) for cache in (*sequence.target, *sequence.drafter)):
            assert start == shared
        again, reused = again + (start < shared), reused + (start > 0)
        rejected = int(random.integers(0, len(text) - shared + 1))
        sequence.run(text, start, rejected)
        assert rejected or all(cache.shows(text, len(text)) for cache in sequence.drafter)
    assert min(again, reused) > 50


@pytest.mark.parametrize("back", [0, 16, 257, 258])
def test_rejected_rows_and_short_rewinds_cost_nothing(back: int) -> None:
    """768 tokens are 257 more than the 511 behind which the next one sees its window of 512."""
    ring = Ring(512, 768)
    for start in range(0, 5000, 100):
        ring.store(start, 100)
    assert ring.reaches(5000 - back, 5000 - back) is (back <= 257)


def test_rings_are_the_buffers_that_have_slots() -> None:
    """The target's are made from windows, and so from the first token on; the drafter's of every token alone."""
    full = Buffer("cache.1.k", "cache", 0, 10)
    target = Buffer("cache.0.k", "cache", 7680, 0, 512, 768)
    drafter = Buffer("drafter.ring.24.k", "cache", 5120, 0, 24, 512)
    for buffers, start in (([full], 4000), ([full, drafter], 4001 - 23), ([full, drafter, target], 0)):
        rings = Rings.of(buffers)
        rings.store(0, 5000)
        assert rings.resume(4900, 4901) == 4900
        assert rings.resume(4000, 4001) == start
    assert Rings.of([full, drafter]).resume(0, 4001) == 0
