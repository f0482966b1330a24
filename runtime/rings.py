"""Which tokens the caches of windowed layers still hold, and from where tokens must be run again to see whole windows.

Such a cache is a ring: with room for S tokens, the token at position p + S takes the place of that at p. After a rewind
a window may reach back to tokens that are overwritten. Knows nothing of devices or memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflashc.runtime.plan import DRAFTER, Buffer


class Ring:
    """The caches of windowed layers that are alike.

    Parameters
    ----------
    window : int
        The latest tokens that a row sees, itself included.
    slots : int
        Tokens that fit.
    """

    def __init__(self, window: int, slots: int) -> None:
        self.window, self._slots = window, slots
        self._first = self._end = 0  # positions stored in one go, some of which are overwritten

    def store(self, start: int, count: int) -> None:
        """Tokens at positions [start, start + count) are stored."""
        if start < self._kept:
            self._first = self._end = start  # nothing before them is left
        self._end = max(self._end, start + count)

    @property
    def _kept(self) -> int:
        """The first position that is still there, with all behind it."""
        return max(self._first, self._end - self._slots)

    def reaches(self, length: int, start: int) -> bool:
        """Whether the row behind `length` tokens sees its window when tokens from `start` on are run again first."""
        wanted = max(0, length - self.window + 1)
        return wanted >= (self._kept if start >= self._kept else start)


class Rings:
    """All rings of a session.

    Parameters
    ----------
    target, drafter : iterable of Ring
        A token's keys in the target are made from windows of its own layers, so those that are lost can be made again
        from the first token on only. The drafter's are made of the target's features at their own position.
    """

    def __init__(self, target: Iterable[Ring], drafter: Iterable[Ring]) -> None:
        self._target: Sequence[Ring] = tuple(target)
        self._drafter: Sequence[Ring] = tuple(drafter)

    @staticmethod
    def of(buffers: Iterable[Buffer]) -> Rings:
        """Those among a plan's buffers."""
        alike = {(b.name.startswith(DRAFTER), b.window, b.slots) for b in buffers if b.slots}
        target, drafter = ([Ring(w, s) for of_drafter, w, s in alike if of_drafter is which] for which in (False, True))
        return Rings(target, drafter)

    def store(self, start: int, count: int) -> None:
        """A run stores tokens, in all layers."""
        for ring in (*self._target, *self._drafter):
            ring.store(start, count)

    def resume(self, start: int, length: int, draft: bool = True) -> int:
        """The last position up to `start` to run tokens from, so that all is there to go on behind `length` tokens.

        Parameters
        ----------
        draft : bool
            Whether the drafter must see its windows too.
        """
        starts = (max(0, length - ring.window + 1) for ring in self._drafter if not ring.reaches(length, start))
        start = min([start, *starts]) if draft else start
        return start if all(ring.reaches(start, start) for ring in self._target) else 0
