"""Interleaved measurements: every case goes round all contestants before the next, and the whole list several times.

A machine drifts by tens of percent over minutes, so only what ran within the same second is compared: ratios are taken
per round, and their median is reported. A sample that other work disturbed is taken again. Knows nothing of how an
engine runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.engines import Engine

_PAUSE = 0.01  # seconds; lets the threads of the engine that ran last fall asleep
_ATTEMPTS = 4
_DISTURBED = 0.01  # of a sample's time, that its threads waited for a core


@dataclass(frozen=True)
class Case:
    """Something to measure: a request with a place for the head, answered in seconds."""

    name: str
    request: str


@dataclass(frozen=True)
class Contestant:
    """An engine with the output head it is asked for."""

    name: str
    engine: Engine
    head: str


@dataclass(frozen=True)
class Series:
    """Values of one contestant in one case, a value per round; `disturbed` of them ran beside other work."""

    values: tuple[float, ...]
    disturbed: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def ratio(self, other: Series) -> Series:
        """Round by round, how many times as large these values are as the other's."""
        return Series(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Median and, in brackets, the range."""
        low, middle, high = (f"{scale * x:.{digits}f}" for x in (min(self.values), self.median, max(self.values)))
        return f"{middle} ({low}-{high})"


Results = dict[str, dict[str, Series]]
"""By case, then by contestant."""


def contest(cases: Sequence[Case], contestants: Sequence[Contestant], rounds: int, attempts: int = _ATTEMPTS,
            heard: Callable[[int], None] = lambda done: None) -> Results:
    """Measure all cases; a round before the first one warms up and is not counted.

    Parameters
    ----------
    attempts : int
        Times a sample is taken at most until nothing disturbs it.
    heard : callable
        Is told after each round how many are done, the one that warms up included.
    """
    samples: dict[str, dict[str, list[_Sample]]] = {c.name: {p.name: [] for p in contestants} for c in cases}
    for turn in range(rounds + 1):
        for case in cases:
            for contestant in contestants if turn % 2 else reversed(contestants):
                sample = _sample(contestant, case, attempts if turn else 1)
                if turn:
                    samples[case.name][contestant.name].append(sample)
        heard(turn + 1)
    return {case: {name: _series(found) for name, found in row.items()} for case, row in samples.items()}


@dataclass(frozen=True)
class _Sample:
    """A measured value, and the share of the time for which its threads waited for a core."""

    seconds: float
    waited: float


def _sample(contestant: Contestant, case: Case, attempts: int) -> _Sample:
    """The first sample that nothing disturbed, or else the least disturbed one."""
    samples: list[_Sample] = []
    while len(samples) < attempts and not any(s.waited <= _DISTURBED for s in samples):
        time.sleep(_PAUSE)
        waited, started = contestant.engine.waited(), time.perf_counter()
        seconds = contestant.engine.ask(case.request.format(head=contestant.head))
        elapsed = time.perf_counter() - started
        samples.append(_Sample(seconds, (contestant.engine.waited() - waited) / elapsed))
    return min(samples, key=lambda s: s.waited)


def _series(samples: Sequence[_Sample]) -> Series:
    return Series(tuple(s.seconds for s in samples), sum(s.waited > _DISTURBED for s in samples))
