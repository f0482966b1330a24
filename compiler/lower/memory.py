"""PlanMemory: places a program's intermediate buffers in one arena by their lifetimes.

First fit by size: the largest buffer first, each at the lowest offset where it meets no other that lives at the same
time. Knows nothing of what the buffers hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `bytes`, written first at step `first` and read last at step `last` (both inclusive)."""

    name: str
    bytes: int
    first: int
    last: int


def plan_memory(lifetimes: Sequence[Lifetime]) -> tuple[dict[str, int], int]:
    """Offsets by buffer name, and the arena's size in bytes."""
    offsets: dict[str, int] = {}
    placed: list[tuple[int, int, Lifetime]] = []  # begin, end, buffer
    for buffer in sorted(lifetimes, key=lambda b: (-b.bytes, b.first, b.name)):
        size = -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        for begin, end, other in sorted(placed, key=lambda p: p[0]):
            overlaps = buffer.first <= other.last and other.first <= buffer.last
            if overlaps and begin < offset + size and offset < end:
                offset = end
        offsets[buffer.name] = offset
        placed.append((offset, offset + size, buffer))
    return offsets, max((end for _, end, _ in placed), default=0)


def step_of_launches(barriers: Sequence[bool]) -> list[int]:
    """The step of each launch: launches up to a barrier run at the same time and share one."""
    steps, step = [], 0
    for barrier in barriers:
        steps.append(step)
        step += barrier
    return steps
