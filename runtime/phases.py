"""How the time of rounds splits into phases, from what devices count anyway.

A phase is the role of a program; the target's pass is "decode" for one row and "verify" for more. Reading the counters
at the beginning and the end of an answer costs its rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflashc.runtime.device.base import Replay
from dflashc.runtime.plan import Program
from dflashc.runtime.statistics import Statistics

RECORD, HOST = "record", "host"
"""Phases in which the device waits: for launches to be recorded, which the first round of a width needs; and for all
else, choosing widths, counting, handing out tokens."""


def phase_of(program: Program) -> str:
    """What a program's part of a round is called."""
    return "verify" if program.role == "decode" and program.rows > 1 else program.role


class PhaseClock:
    """Sums what the launches of replays took since `start`, by phase."""

    def __init__(self) -> None:
        self._replays: list[tuple[Replay, list[str]]] = []
        self._before: list[np.ndarray] = []

    def add(self, replay: Replay, programs: Sequence[Program]) -> None:
        """A replay that was recorded from `programs`, one behind the other, and has not run yet."""
        self._replays.append((replay, [phase_of(p) for p in programs for _ in p.launches]))

    def start(self) -> None:
        """Count from here on."""
        self._before = [replay.ticks() for replay, _ in self._replays]

    def seconds(self, statistics: Statistics) -> dict[str, float]:
        """`decode_seconds` of the rounds since `start` by phase; empty where the device counts nothing."""
        spent: dict[str, int] = {}
        for index, (replay, phases) in enumerate(self._replays):
            ticks = replay.ticks()
            if index < len(self._before):
                ticks = ticks - self._before[index]
            for phase, count in zip(phases, ticks.tolist(), strict=True):
                spent[phase] = spent.get(phase, 0) + count
        total = sum(spent.values())
        if not total:
            return {}
        device = {phase: statistics.device_seconds * count / total for phase, count in spent.items() if count}
        host_seconds = statistics.decode_seconds - statistics.device_seconds - statistics.record_seconds
        return device | {RECORD: statistics.record_seconds, HOST: host_seconds}
