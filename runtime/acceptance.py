"""How likely the target is to keep each position of a draft: a running estimate from the rounds so far.

Knows nothing of costs, devices or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

UNKNOWN = 0.7
"""Assumed of the first position when nothing is known."""


class Acceptance:
    """Running estimate of the probability that a position is kept, given that all before it were.

    An exponential average over the last `_MEMORY` rounds that drafted. Where little was seen of a position, it is drawn
    to the estimate of the one before it, so that what is learnt near the anchor holds for wider drafts until they are
    tried. Conditional probabilities are what a round of any width shows without bias for the positions it reached;
    their products are the probabilities of reaching a position.

    Parameters
    ----------
    assumed : sequence of float
        Per position 1.. what to start from, above 0; its length is the widest draft. Later on its first value, and how
        each of the others relates to the one before.
    """

    _MEMORY = 32  # rounds: long enough to be steady, short enough to follow the text
    _TRUST = 1  # round that an assumption is worth
    _GROWTH = _MEMORY / (_MEMORY - 1)
    _FADING, _FADED = _GROWTH ** (1 / 8), 6  # plain rounds make evidence old, down to what so many rounds are worth

    def __init__(self, assumed: Sequence[float]) -> None:
        self._first = assumed[0]
        self._ratios = [1.0, *(b / a for a, b in pairwise(assumed))]
        self._kept = [0.0] * len(assumed)
        self._reached = [0.0] * len(assumed)
        self._unit = 1.0  # weight of the next round; growing, which spares shrinking all the others

    def record(self, width: int, accepted: int) -> None:
        """A round of `width` proposals kept the first `accepted` of them."""
        if not width:
            if self._reached[0] > self._FADED * self._unit:
                self._unit *= self._FADING
            return
        for position in range(accepted):
            self._kept[position] += self._unit
            self._reached[position] += self._unit
        if accepted < width:
            self._reached[accepted] += self._unit
        self._unit *= self._GROWTH
        if self._unit > 1e100:
            self._kept = [x / self._unit for x in self._kept]
            self._reached = [x / self._unit for x in self._reached]
            self._unit = 1.0

    def conditional(self) -> list[float]:
        """Per position, the probability that it is kept when all before it were."""
        trust, before, estimates = self._TRUST * self._unit, self._first, []
        for kept, reached, ratio in zip(self._kept, self._reached, self._ratios, strict=True):
            before = min(1.0, (kept + trust * before * ratio) / (reached + trust))
            estimates.append(before)
        return estimates


def expected_tokens(conditional: Sequence[float]) -> list[float]:
    """Tokens per round by width 0..: one, and the proposals that are kept, from `Acceptance.conditional`."""
    tokens, reached = [1.0], 1.0
    for probability in conditional:
        reached *= probability
        tokens.append(tokens[-1] + reached)
    return tokens
