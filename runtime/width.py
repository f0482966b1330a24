"""How many tokens to draft per round: a fixed number, or the one that promises most tokens per second.

Owns the running estimate of acceptance and the cost of a round per width. Knows nothing of devices or tokens.
"""

from __future__ import annotations

from typing import Protocol


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
