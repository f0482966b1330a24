"""What speculation did for an answer, in words: a summary, and warnings when it did not help.

Pure functions of what a session counted. Knows nothing of streams or terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dflashc.runtime.session import Statistics
from dflashc.runtime.width import Promise

_SHOWN = 8  # positions
_ROUNDS = 32  # before anything is said about acceptance
_PLAIN_ROUNDS = 8
_LOW = 0.1  # accepted proposals per round
_UNUSED = 0.95  # of the rounds


def summary(statistics: Statistics) -> str | None:
    """One line; None when nothing was drafted.

    Per position it gives the share of rounds that kept it, out of those that made it.
    """
    drafted = drafted_rounds(statistics)
    if not drafted:
        return None
    tokens = drafted + statistics.accepted
    shares = [r / o for r, o in zip(statistics.reached, statistics.offered, strict=True)]
    shown = " ".join(f"{share:.2f}" for share in shares[:_SHOWN]) + (" …" if len(shares) > _SHOWN else "")
    plain = statistics.rounds - drafted
    return (f"speculation: {tokens} tokens in {drafted} rounds, {tokens / drafted:.2f} per round"
            + (f", {plain} plain steps" if plain else "") + f", accepted {shown} per position")


def drafted_rounds(statistics: Statistics) -> int:
    """Rounds that drafted something."""
    return statistics.offered[0] if statistics.offered else 0


def warnings(statistics: Statistics, promises: Sequence[Promise] = (), plain_seconds: float | None = None) -> list[str]:
    """What the user should know when speculation does not help.

    Parameters
    ----------
    promises : sequence of Promise
        What the controller of the width expects, see `AutoWidth.promises`.
    plain_seconds : float, optional
        Time of a plain step from elsewhere, for runs that made none.
    """
    found = [_low_acceptance(statistics), _slower(statistics, plain_seconds), _unused(statistics, promises)]
    return [warning for warning in found if warning]


class OnceOnly:
    """Lets every kind of warning through once, also when its figures change."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def new(self, found: Sequence[str]) -> list[str]:
        """Those of `found` that were not said yet; a kind is what stands before the colon."""
        fresh = [warning for warning in found if warning.partition(":")[0] not in self._said]
        self._said |= {warning.partition(":")[0] for warning in fresh}
        return fresh


def _low_acceptance(statistics: Statistics) -> str | None:
    drafted = drafted_rounds(statistics)
    if drafted < _ROUNDS or statistics.accepted >= _LOW * drafted:
        return None
    return (f"hardly any draft is accepted: {statistics.accepted} of {statistics.drafted} proposals in {drafted} "
            "rounds; likely causes: a drafter for another model or quantisation, layers tapped one off (build with "
            "--taps-offset), a text longer than the drafter's window, or thinking the drafter was not trained for")


def _slower(statistics: Statistics, plain_seconds: float | None) -> str | None:
    """Compares medians, since single rounds may wait for other work; of answers that were drafted for the most part."""
    drafted = drafted_rounds(statistics)
    plain = statistics.round_seconds.get(0, [])
    if len(plain) >= _PLAIN_ROUNDS:
        plain_seconds = median(plain)
    if drafted < max(_ROUNDS, statistics.rounds / 2) or plain_seconds is None:
        return None
    seconds = sum(len(times) * median(times) for width, times in statistics.round_seconds.items() if width)
    ours = (drafted + statistics.accepted) / seconds
    if ours * plain_seconds >= 1:
        return None
    return (f"speculation is slower than plain decoding: {ours:,.1f} against {1 / plain_seconds:,.1f} tokens per "
            "second; measure the widths with `dflashc tune`, or use --width 0")


def _unused(statistics: Statistics, promises: Sequence[Promise]) -> str | None:
    plain = len(statistics.round_seconds.get(0, []))
    speeds = {p.width: p for p in promises}
    if statistics.rounds < _ROUNDS or plain < _UNUSED * statistics.rounds or len(speeds) < 2 or 0 not in speeds:
        return None
    best = max((p for p in promises if p.width), key=lambda p: p.speed)
    return (f"the drafter is hardly used: plain decoding promises {speeds[0].speed:,.1f} tokens per second, drafts of "
            f"{best.width} {best.speed:,.1f} ({best.tokens:.2f} tokens in {best.seconds / speeds[0].seconds:.2f} times "
            "a plain step)")
