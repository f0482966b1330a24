"""How many tokens to draft per round: a fixed number, or the one that promises most tokens per second.

Owns the choice, and how much may be spent on trying others. Knows nothing of devices or tokens, and decides from what
it hears alone: the same rounds lead to the same widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dflashc.runtime.acceptance import UNKNOWN, Acceptance, expected_tokens
from dflashc.runtime.costs import Costs, LearntCosts

HOPE = 0.8
"""Acceptance of a position that a trial counts on, unless better is known."""


class WidthController(Protocol):
    """Chooses the width of each round and hears how it went."""

    def choose(self, depth: int) -> int:
        """Width of the next round, at `depth` committed tokens; 0 is a plain step."""

    def record(self, width: int, accepted: int, seconds: float) -> None:
        """A round of `width` proposals kept `accepted` of them and took `seconds`."""


class FixedWidth:
    """Always the same width."""

    def __init__(self, width: int) -> None:
        self._width = width

    def choose(self, depth: int) -> int:
        return self._width

    def record(self, width: int, accepted: int, seconds: float) -> None:
        pass


@dataclass(frozen=True)
class Promise:
    """What a round of some width is expected to yield and to take."""

    width: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class AutoWidth:
    """The width that promises most tokens per second, from costs and the acceptance seen so far; 0 is among them.

    At a narrow width nothing is learnt of wider drafts. So a wider one is tried now and then, if it would win should
    all positions beyond the chosen width be kept as often as hoped. A trial may lose time, all trials together at most
    `SHARE` of the time of the other rounds; one that pays off earns the next, so that good times are noticed at once.

    Parameters
    ----------
    most : int
        Widest draft.
    costs : Costs, optional
        Of a round; learnt on the way when left out.
    assumed : sequence of float, optional
        Acceptance per position, given that all before it were kept, to start from.
    hoped : sequence of float, optional
        The same at its best.
    """

    SHARE = 0.02
    MARGIN = 1.05
    """A width takes over when it is better by this factor, or for `_WHILE` decisions by anything."""

    _PERIOD = 8  # rounds between decisions
    _WHILE = 4
    _TRIALS_FIRST, _TRIALS_SAVED = 8, 2  # trials that fail which may be afforded: at the start, and later at once
    _CHEAPER = 1.3  # factor by which another width's cost may have fallen

    def __init__(self, most: int, costs: Costs | None = None, assumed: Sequence[float] | None = None,
                 hoped: Sequence[float] | None = None) -> None:
        self._costs: Costs = costs or LearntCosts(most)
        self._acceptance = Acceptance(assumed or [UNKNOWN] * most)
        self._hoped = list(hoped or [HOPE] * most)
        self._width = 0
        self._decided = False
        self._chosen = 0  # for the coming round: the width, or one that is tried
        self._led = 0  # decisions in a row that another width was better
        self._until_decision = 0  # rounds
        self._seconds: dict[int, float] = {}  # of a round by width, as of the last decision
        self._token_seconds = 0.0  # at the chosen width
        self._trial: int | None = None  # width to try as soon as it can be afforded
        self._risk = 0.0  # seconds that it loses when nothing of it is kept
        self._allowance = 0.0  # seconds that trials may lose
        self._rounds = 0
        self._last_run: dict[int, int] = {}  # round by width

    def choose(self, depth: int) -> int:
        unmeasured = self._costs.unmeasured()
        if unmeasured is not None:
            self._chosen = unmeasured
        else:
            if self._until_decision == 0:
                self._decide(depth)
            self._until_decision -= 1
            affordable = self._allowance >= self._risk
            self._chosen = self._trial if self._trial is not None and affordable else self._width
        return self._chosen

    def record(self, width: int, accepted: int, seconds: float) -> None:
        self._rounds += 1
        self._last_run[width] = self._rounds
        self._acceptance.record(width, accepted)
        usual = self._decided and width == self._width
        self._costs.record(width, seconds, usual=usual)
        if not self._decided or width != self._chosen:
            return  # a width that was run for another reason is not charged
        if usual:
            gained = self.SHARE * self._seconds[width]
        else:
            gained = (1 + accepted) * self._token_seconds - self._seconds[width]
            self._until_decision = 0
        most = max(self._allowance, self._TRIALS_SAVED * self._risk)
        self._allowance = min(self._allowance + gained, most)

    def promises(self, depth: int) -> list[Promise]:
        """What to expect of the widths at `depth`; empty while costs are unknown."""
        tokens = expected_tokens(self._acceptance.conditional())
        return [Promise(width, tokens[width], seconds) for width, seconds in self._costs.at(depth).items()]

    def _decide(self, depth: int) -> None:
        promises = {p.width: p for p in self.promises(depth)}
        best = max(promises.values(), key=lambda p: p.speed)
        now = promises[self._width] if self._decided else best
        self._led = self._led + 1 if best.speed > now.speed else 0
        if best.speed > self.MARGIN * now.speed or self._led == self._WHILE:
            now, self._led = best, 0
        self._width = now.width
        self._until_decision = self._PERIOD
        self._seconds = {width: p.seconds for width, p in promises.items()}
        self._token_seconds = 1 / now.speed
        self._trial = self._worth_trying(promises, now)
        self._risk = 0.0 if self._trial is None else max(0.0, self._seconds[self._trial] - self._token_seconds)
        if not self._decided and not self._costs.learns:
            self._allowance = self._TRIALS_FIRST * self._risk
        self._decided = True

    def _worth_trying(self, promises: dict[int, Promise], now: Promise) -> int | None:
        kept = self._acceptance.conditional()
        tokens = expected_tokens([*kept[: now.width], *map(max, kept[now.width :], self._hoped[now.width :])])
        hopes = [Promise(p.width, tokens[p.width], p.seconds) for p in promises.values()]
        best = max(hopes, key=lambda p: p.speed)
        trials = {best.width} if best.speed > now.speed else set()
        if self._costs.learns:  # others may cost less than they did
            trials |= {p.width for p in promises.values() if p.speed * self._CHEAPER > now.speed}
        return min(trials - {now.width}, key=lambda width: self._last_run.get(width, 0), default=None)
