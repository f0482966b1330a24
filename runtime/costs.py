"""What a round of each width costs: a table that was measured at several depths, or learnt from the rounds themselves.

Between depths a cost is interpolated, between widths never: it has cliffs where a kernel takes another shape.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Protocol


class Costs(Protocol):
    """Seconds per round."""

    learns: bool

    def at(self, depth: int) -> dict[int, float]:
        """Seconds of a round at `depth` committed tokens, by width; widths that are not to be used are left out."""

    def unmeasured(self) -> int | None:
        """A width that must be run before `at` can tell anything, None when there is none."""

    def record(self, width: int, seconds: float, *, usual: bool) -> None:
        """A round took `seconds`; `usual` when its width is the one that is run all the time."""


@dataclass(frozen=True)
class CostTable:
    """Costs that were measured beforehand.

    Attributes
    ----------
    depths : tuple of int
        Committed tokens, ascending.
    seconds : tuple of tuple of float
        Per depth, the seconds of a round of every width 0.. .
    """

    depths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    learns = False

    def at(self, depth: int) -> dict[int, float]:
        """Linear in depth between the measured ones, constant outside."""
        above = bisect_right(self.depths, depth)
        if above in (0, len(self.depths)):
            return dict(enumerate(self.seconds[min(above, len(self.depths) - 1)]))
        low, high = self.depths[above - 1], self.depths[above]
        share = (depth - low) / (high - low)
        return {width: a + (b - a) * share
                for width, (a, b) in enumerate(zip(self.seconds[above - 1], self.seconds[above], strict=True))}

    def unmeasured(self) -> int | None:
        return None

    def record(self, width: int, seconds: float, *, usual: bool) -> None:
        """What was measured at leisure is better than the time of a round among others."""


class LearntCosts:
    """Costs of a few widths, learnt while generating.

    A cost is the median of a width's last rounds times a factor common to all widths: load and depth change all of them
    alike, and from the rounds of a single width nothing else can be told. Medians, because a round may wait for
    something else at any time, and the first one of a width pays for its recording.
    """

    learns = True
    _WIDTHS = (0, 1, 2, 3, 5, 8)
    _FIRST, _LAST = 3, 9  # rounds: before a width counts; that a median looks back on

    def __init__(self, most: int) -> None:
        self._rounds: dict[int, deque[float]] = {
            width: deque(maxlen=self._LAST) for width in (*self._WIDTHS, most) if width <= most}
        self._factors: deque[float] = deque([1.0], maxlen=self._LAST)
        self._unmeasured = sorted(self._rounds)

    def at(self, depth: int) -> dict[int, float]:
        factor = median(self._factors)
        return {width: median(rounds) * factor for width, rounds in self._rounds.items() if rounds}

    def unmeasured(self) -> int | None:
        return self._unmeasured[0] if self._unmeasured else None

    def record(self, width: int, seconds: float, *, usual: bool) -> None:
        rounds = self._rounds.get(width)
        if rounds is None:
            return
        if usual:
            self._factors.append(seconds / median(rounds))
        else:
            rounds.append(seconds / median(self._factors))
            if len(rounds) == self._FIRST:
                self._unmeasured.remove(width)
