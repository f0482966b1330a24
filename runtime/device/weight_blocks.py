"""How `weights.bin` is cut into blocks of device memory: whole weights, and never within what a launch reads as one.

Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dflashc.runtime.manifest import Weight

BLOCK_BYTES = 1 << 30
"""Drivers refuse allocations above 2 or 4 GiB; a single weight may be larger than this, which is then its block."""


@dataclass(frozen=True)
class Part:
    """A weight, with those that lie behind it as far as some launch reads them as one: a range of `weights.bin`."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class WeightBlock:
    """A range of `weights.bin` and the weights in it."""

    offset: int
    nbytes: int
    parts: list[Part] = field(default_factory=list)


def weight_parts(weights: Iterable[Weight], adjacent: Sequence[Sequence[str]]) -> list[Part]:
    """Every weight as a kernel sees it, by offset.

    Parameters
    ----------
    adjacent : sequence
        See `Plan.adjacent`.
    """
    ends = {w.name: w.offset + w.bytes for w in weights}
    reach = dict(ends)
    for names in adjacent:
        reach[names[0]] = max(reach[names[0]], ends[names[-1]])
    ordered = sorted(weights, key=lambda w: w.offset)
    return [Part(w.name, w.offset, reach[w.name] - w.offset) for w in ordered]


def weight_blocks(weights: Iterable[Weight], adjacent: Sequence[Sequence[str]],
                  most: int = BLOCK_BYTES) -> Iterator[WeightBlock]:
    """Blocks of at most `most` bytes where the weights allow it, in the order of the file."""
    begin = end = 0
    parts: list[Part] = []
    for group in _groups(weight_parts(weights, adjacent)):
        group_end = max(p.offset + p.nbytes for p in group)
        if parts and group_end - begin > most:
            yield WeightBlock(begin, end - begin, parts)
            parts = []
        if not parts:
            begin = group[0].offset
        parts += group
        end = max(end, group_end)
    if parts:
        yield WeightBlock(begin, end - begin, parts)


def _groups(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Runs of parts that overlap."""
    group: list[Part] = []
    end = 0
    for part in parts:
        if group and part.offset >= end:
            yield group
            group = []
        group.append(part)
        end = max(end, part.offset + part.nbytes)
    if group:
        yield group
