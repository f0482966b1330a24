"""Generations at chosen widths."""

from __future__ import annotations

from collections.abc import Sequence

from dflashc.runtime.drafting import DraftParameters
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from dflashc.runtime.width import FixedWidth
from tests.proof.running import GREEDY

WIDTHS = range(16)
MIXED = (3, 0, 15, 1, 7, 2, 11)
"""Widths that take turns."""
MATCH, REJECT = DraftParameters(accept="match"), DraftParameters(accept="reject")


class TakingTurns:
    """A width controller whose rounds have the widths of a list, over and over."""

    def __init__(self, widths: Sequence[int] = MIXED) -> None:
        self._widths = widths
        self._round = 0

    def choose(self, depth: int) -> int:
        self._round += 1
        return self._widths[(self._round - 1) % len(self._widths)]

    def record(self, width: int, accepted: int, seconds: float) -> None:
        pass


def generate(session: Session, prompt: Sequence[int], count: int, width: int | None = None,
             parameters: SamplingParameters = GREEDY, stop: frozenset[int] = frozenset(),
             drafting: DraftParameters | None = None) -> list[int]:
    """The next tokens, drafted at a width, or at widths that take turns; reuses what the session holds."""
    chosen = TakingTurns() if width is None else FixedWidth(width)
    return list(session.generate(prompt, parameters, count, stop, chosen, drafting=drafting))


def afresh(session: Session, prompt: Sequence[int], count: int, width: int | None = None,
           parameters: SamplingParameters = GREEDY, drafting: DraftParameters | None = None) -> list[int]:
    """`generate` in a session that forgets all it held."""
    session.rewind(0)
    return generate(session, prompt, count, width, parameters, drafting=drafting)
