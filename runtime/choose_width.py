"""The width controller that a user's wish leads to: fixed, tuned, or one that learns.

Knows where tuning records are found and what they mean to a controller; nothing of how either works.
"""

from __future__ import annotations

from typing import Any, Literal

from dflashc.runtime import tuning
from dflashc.runtime.artefact import Artefact
from dflashc.runtime.costs import CostTable
from dflashc.runtime.device.base import Device
from dflashc.runtime.errors import RequestError
from dflashc.runtime.width import HOPE, AutoWidth, FixedWidth, WidthController

_LEAST = 0.01
"""Acceptance that is assumed of a position which was never kept in a measurement."""


def make_width(artefact: Artefact, device: Device[Any], asked: int | Literal["auto"], *,
               as_recorded: bool = True) -> tuple[WidthController | None, list[str]]:
    """The controller for a session, which should keep it from answer to answer, and notes for the user.

    Parameters
    ----------
    asked : a fixed width, 0 drafts nothing; or "auto".
    as_recorded : whether rounds are like those that records are of: greedy, with drafts that are not cut. Others are
        learnt.

    Returns
    -------
    WidthController or None
        None where the artefact has no drafter.

    Raises
    ------
    RequestError
        A width that the drafter cannot make.
    """
    most: int = artefact.manifest.drafter.get("width", 0)
    if asked != "auto":
        if not 0 <= asked <= most:
            limit = f"this drafter makes 0 to {most}" if most else "this artefact has no drafter"
            raise RequestError(f"a width of {asked} drafted tokens was asked for; {limit}")
        return (FixedWidth(asked), []) if most else (None, [])
    if not most:
        return None, ["this artefact has no drafter: decoding plainly"]
    if not as_recorded:
        return AutoWidth(most), ["draft width: learning what rounds cost, since records are of greedy, uncut drafts"]
    record, where = tuning.find(artefact, device)
    if record is None:
        return AutoWidth(most), [f"draft width: learning what rounds cost ({where}; see `dflashc tune`)"]
    return from_record(record), [f"draft width: by the tuning record {where}"]


def from_record(record: tuning.Record) -> AutoWidth:
    """A controller that knows the costs, and starts from the mean acceptance of all kinds of text."""
    kinds = [[max(p, _LEAST) for p in counts.conditional()] for counts in record.acceptance.values()]
    costs = CostTable(record.depths, record.rounds)
    if not kinds:
        return AutoWidth(record.most_width, costs)
    positions = list(zip(*kinds, strict=True))
    return AutoWidth(record.most_width, costs, [sum(p) / len(p) for p in positions],
                     [max(HOPE, *p) for p in positions])
