"""Chooses among the kernels that a plan offers for a launch, by timing them on the device.

Every choice is timed in the programs of 1, 8 and 16 rows that have it, the variants in turns, so that a disturbance
meets all of them alike. Knows nothing of what kernels do, nor of where choices are stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.base import Device, Replay
from dflashc.runtime.device.memories import session_memories
from dflashc.runtime.errors import TargetError
from dflashc.runtime.plan import Launch, Plan

TRIAL_SECONDS = 5.0
"""A variant whose first run takes longer is out."""

_CONTEXT = 256  # tokens: a matmul does not read the caches
_ROWS = (1, 8, 16)
_TURNS = 7
_GAIN = 0.98
"""A variant has to take less than this share of the default's time: what is gained must be more than noise."""


@dataclass(frozen=True)
class Trial:
    """What the variants of a choice take.

    Attributes
    ----------
    seconds : dict
        By variant, the best time of its launches; infinite for one that failed or took too long.
    default, best : str
        Variants.
    """

    choice: str
    seconds: dict[str, float]
    default: str
    best: str


def choices_of(plan: Plan) -> dict[str, list[Launch]]:
    """By choice, one launch for each of the numbers of rows that are timed."""
    found: dict[str, dict[int, Launch]] = {}
    for program in plan.programs.values():
        for launch in program.launches:
            if launch.choice and program.rows in _ROWS:
                found.setdefault(launch.choice, {}).setdefault(program.rows, launch)
    return {choice: list(launches.values()) for choice, launches in found.items()}


def time_kernels(artefact: Artefact, device: Device[Any], heard: Callable[[str, int, int], None]) -> list[Trial]:
    """Time every variant of every choice. A variant that the device cannot run is out, and is no error."""
    choices = choices_of(artefact.plan)
    if not choices:
        return []
    memories = session_memories(artefact, device, _CONTEXT)
    memories |= {"hidden": memories["residual"]}
    trials = []
    for index, (choice, launches) in enumerate(choices.items()):
        heard(f"kernels of {choice}", index, len(choices))
        trials.append(_trial(choice, launches, device, memories))
    return trials


def _trial(choice: str, launches: list[Launch], device: Device[Any], memories: Mapping[str, Any]) -> Trial:
    names = [name for name, _ in launches[0].variants]
    default = names[0]
    replays: dict[str, Replay] = {}
    seconds = dict.fromkeys(names, math.inf)
    for name in names:
        try:
            replay = device.record([x.variant(name) for x in launches], memories, _CONTEXT)
            started = time.perf_counter()
            replay.run()
            if time.perf_counter() - started <= TRIAL_SECONDS:
                replays[name] = replay
        except TargetError:
            if name == default:
                raise
    for _ in range(_TURNS):
        for name, replay in replays.items():
            seconds[name] = min(seconds[name], float(np.sum(replay.seconds())))
    fastest = min(names, key=seconds.__getitem__)
    return Trial(choice, seconds, default, fastest if seconds[fastest] < _GAIN * seconds[default] else default)
