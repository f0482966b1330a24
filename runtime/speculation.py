"""What speculation did for an answer, in words: a summary, and warnings when it did not help.

Pure functions of what a session counted. Knows nothing of streams or terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dflashc.runtime.statistics import Statistics
from dflashc.runtime.width import Promise

_SHOWN = 8  # positions
_ROUNDS = 32  # before anything is said about acceptance
_PLAIN_ROUNDS = 8
_LOW = 0.1  # accepted proposals per round
_UNUSED = 0.95  # of the rounds
_LEAST_SHARE = 1.0  # percent of the time that a phase is named for
_RULES = {"": "", "match": "by matching ", "reject": "by rejection "}


def summary(statistics: Statistics) -> str | None:
    """One line; None when nothing was drafted.

    Per position it gives the share of rounds that kept it, out of those that verified it.
    """
    drafts = statistics.drafts
    if not drafts:
        return None
    tokens, plain = drafts + statistics.accepted, statistics.rounds - drafts
    shares = [r / o for r, o in zip(statistics.reached, statistics.offered, strict=True)]
    shown = " ".join(f"{share:.2f}" for share in shares[:_SHOWN]) + (" …" if len(shares) > _SHOWN else "")
    left, made = statistics.drafted / drafts, (statistics.drafted + statistics.cut) / drafts
    return (f"speculation: {tokens} tokens in {drafts} rounds, {tokens / drafts:.2f} per round"
            + (f", {plain} plain steps" if plain else "")
            + (f", p-min left {left:.1f} of {made:.1f} proposals" if statistics.cut else "")
            + (f", accepted {_RULES[statistics.rule]}{shown} per position" if shown else ""))


def time_shares(statistics: Statistics) -> str | None:
    """One line on where the time of the rounds went, the costliest phase first; None where nothing was counted."""
    total = sum(statistics.phase_seconds.values())
    if not total:
        return None
    shares = {phase: 100 * seconds / total for phase, seconds in statistics.phase_seconds.items()}
    shown = {phase: share for phase, share in shares.items() if share >= _LEAST_SHARE}
    if (rest := sum(shares.values()) - sum(shown.values())) >= _LEAST_SHARE:
        shown["other"] = rest
    return "time: " + ", ".join(f"{phase} {shown[phase]:.0f} %" for phase in sorted(shown, key=lambda p: -shown[p]))


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
    drafts = statistics.drafts
    if drafts < _ROUNDS or statistics.accepted >= _LOW * drafts:
        return None
    return (f"hardly any draft is accepted: {statistics.accepted} of {statistics.drafted} proposals in {drafts} "
            "rounds; likely causes: a drafter for another model or quantisation, layers tapped one off (build with "
            "--taps-offset), a text longer than the drafter's window, or thinking the drafter was not trained for")


def _slower(statistics: Statistics, plain_seconds: float | None) -> str | None:
    """Compares medians, since single rounds may wait for other work; of answers that were drafted for the most part."""
    drafts = statistics.drafts
    plain = statistics.round_seconds.get(0, [])
    if len(plain) >= _PLAIN_ROUNDS:
        plain_seconds = median(plain)
    if drafts < max(_ROUNDS, statistics.rounds / 2) or plain_seconds is None:
        return None
    seconds = sum(len(times) * median(times) for width, times in statistics.round_seconds.items() if width)
    ours = (drafts + statistics.accepted) / seconds
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
