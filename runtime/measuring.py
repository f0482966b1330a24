"""Measures what rounds cost on a device, and how much of a drafter's proposals the target keeps.

Every width is timed, none is guessed from its neighbours. Knows nothing of where results are stored or shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from dflashc.runtime.tuning import Counts
from dflashc.runtime.width import FixedWidth

_ROLES = {"draft": ("draft", "propose"), "verify": ("positions", "decode", "ids"), "inject": ("inject", "accept")}
PARTS = ("rounds", *_ROLES)

Heard = Callable[[str, int, int], None]
"""Is told what is measured, and how many of how many steps are done."""

_LEAST_PASSES, _MOST_PASSES = 3, 100
_RUNS = 3  # of a part in a row; the first finds caches as the part before left them and is not counted
_DEPTH_FACTOR = 4
_FIRST_DEPTH = 1024


@dataclass(frozen=True)
class Costs:
    """Seconds by part, depth and width; `spread` is how far the times of one and the same round lie apart.

    Attributes
    ----------
    spread : float
        Third quartile divided by the first, of the whole rounds, the median over all of them.
    """

    depths: tuple[int, ...]
    parts: dict[str, tuple[tuple[float, ...], ...]]
    spread: float


def depths_up_to(context: int, most_width: int) -> list[int]:
    """0, 1024, 4096, ... and the deepest at which the widest round still fits `context` tokens."""
    deepest = context - most_width - 1
    depths, depth = [0], _FIRST_DEPTH
    while depth < deepest:
        depths.append(depth)
        depth *= _DEPTH_FACTOR
    return [*depths, deepest] if deepest > 0 else depths


def measure_costs(session: Session, depths: Sequence[int], seconds: float, heard: Heard) -> Costs:
    """Time every width at every depth, in turns, so that a disturbance meets all of them alike.

    A cost is the first quartile of its times: other work on the machine only ever adds to them.

    Parameters
    ----------
    seconds : float
        Time for each depth; at least three passes are made, however long they take.
    """
    parts: dict[str, list[tuple[float, ...]]] = {part: [] for part in PARTS}
    spreads: list[float] = []
    for index, depth in enumerate(depths):
        heard(f"costs at depth {depth:,}", index, len(depths))
        session.rehearse(depth)
        samples = _samples(session, seconds)
        for part in PARTS:
            parts[part].append(tuple(_quartile(samples[part, w], 1) for w in range(session.most_width + 1)))
        spreads += [_quartile(samples["rounds", w], 3) / _quartile(samples["rounds", w], 1)
                    for w in range(session.most_width + 1)]
    session.rewind(0)
    return Costs(tuple(depths), {part: tuple(rows) for part, rows in parts.items()}, median(spreads))


def _samples(session: Session, seconds: float) -> dict[tuple[str, int], list[float]]:
    """Times of all parts and widths at the present depth."""
    widths = range(session.most_width + 1)
    samples: dict[tuple[str, int], list[float]] = {(part, w): [] for part in PARTS for w in widths}
    for width in widths:  # recording is not timed
        for part in PARTS:
            _time(session, part, width)
    ends = time.perf_counter() + seconds
    for done in range(_MOST_PASSES):
        if done >= _LEAST_PASSES and time.perf_counter() > ends:
            break
        for width in widths:
            for part in PARTS:
                samples[part, width] += [_time(session, part, width) for _ in range(_RUNS)][1:]
    return samples


def _time(session: Session, part: str, width: int) -> float:
    """Seconds of a part of a round; of the whole, with all that a session does for it."""
    if part in _ROLES:
        return session.time(width, *_ROLES[part])
    depth = len(session.tokens)
    started = time.perf_counter()
    session.round(0, width)
    seconds = time.perf_counter() - started
    session.rewind(depth)
    return seconds


def _quartile(times: Sequence[float], which: int) -> float:
    return sorted(times)[len(times) * which // 4]


def measure_acceptance(session: Session, prompts: Mapping[str, Sequence[Sequence[int]]], tokens: int, seconds: float,
                       end: frozenset[int], heard: Heard) -> dict[str, Counts]:
    """Generate greedily at the widest draft, and count by kind of text what is kept.

    Parameters
    ----------
    prompts : mapping
        Token ids by kind.
    tokens : int
        To generate per prompt.
    seconds : float
        Time for each kind; the first prompt is finished, however long it takes.
    """
    counts = {}
    for index, (kind, texts) in enumerate(prompts.items()):
        heard(f"acceptance on {kind}", index, len(prompts))
        ends = time.perf_counter() + seconds
        total = _Total(session.most_width)
        for prompt in _until(texts, ends):
            for _ in session.generate(prompt, SamplingParameters(temperature=0.0), tokens, end,
                                      FixedWidth(session.most_width)):
                pass
            total.add(session.statistics.reached, session.statistics.offered)
        counts[kind] = Counts(tuple(total.reached), tuple(total.offered))
    return counts


def _until(texts: Sequence[Sequence[int]], ends: float) -> Iterator[Sequence[int]]:
    for index, text in enumerate(texts):
        if index and time.perf_counter() > ends:
            return
        yield text


class _Total:
    """Counts per position over several answers; an answer near its end makes narrower drafts, and fewer positions."""

    def __init__(self, most: int) -> None:
        self.reached, self.offered = [0] * most, [0] * most

    def add(self, reached: Sequence[int], offered: Sequence[int]) -> None:
        for position, (r, o) in enumerate(zip(reached, offered, strict=True)):
            self.reached[position] += r
            self.offered[position] += o
