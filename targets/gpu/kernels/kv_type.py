"""What attention and injection ask of the type that a layer's K and V caches are stored in.

A cache is an array of uint32 words. It holds the tokens of each KV head one behind the other; its capacity in tokens is
a multiple of 256, and position p is in slot p mod capacity, so a cache that is smaller than the context is a ring.
Keys lie in groups of 32, the same word of each side by side, for a thread takes a key; the words of a value lie side by
side, for a thread takes two of its dimensions. Knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, KernelBuilder, bind, cast, f32, i32, reinterpret, select

KEYS = 32
"""Keys that lie side by side."""

QUERIES = 8
"""Queries of a workgroup."""

_LARGEST = 65504.0  # of float16


@dataclass(frozen=True)
class Place:
    """A token's place in the caches of a layer: its KV head and its slot, of `capacity` slots."""

    head: Expr
    slot: Expr
    capacity: Expr

    @staticmethod
    def of(head: Expr, position: Expr, capacity: Expr) -> Place:
        """The place of a position."""
        return Place(head, bind(tirx.truncmod(position, capacity)), capacity)

    def ahead(self, tokens: Expr) -> Place:
        """The place of a later token, with no end of the cache in between."""
        return Place(self.head, bind(self.slot + tokens), self.capacity)

    def key(self, words: int, word: Expr | int) -> Expr:
        """Index of a word of the key, of `words`, in an array of keys alone."""
        side_by_side = bind(tirx.truncmod(self.slot, i32(KEYS)))
        return (self.head * self.capacity + self.slot - side_by_side) * words + word * KEYS + side_by_side

    def value(self, words: int, word: Expr | int) -> Expr:
        """Index of a word of the value, of `words`, in an array of values alone."""
        return (self.head * self.capacity + self.slot) * words + word


class KvType(Protocol):
    """One object per kernel: it knows the head size D, and keeps a workgroup's queries as its keys want them."""

    def store_key(self, keys: Expr, place: Place, element: Callable[[Expr], Expr], thread: Expr, wanted: Expr,
                  scratch: Expr) -> None:
        """Store keys of 16 tokens by a workgroup of 256 threads, 16 for each; all of them must call it.

        Parameters
        ----------
        place, element, wanted
            Of this thread's token: where its key belongs, element(d) of it, float32, which must exist even where the
            token is not wanted.
        scratch : shared float32 (256,)
        """

    def store_value(self, values: Expr, place: Place, element: Callable[[Expr], Expr], thread: Expr, wanted: Expr,
                    scratch: Expr) -> None:
        """The same for values."""

    def declare_queries(self, k: KernelBuilder) -> None:
        """Declare shared memory for 8 queries."""

    def keep_query(self, query: Expr, dimension: Expr, value: Expr) -> None:
        """Store a number of a query."""

    def take_queries(self, thread: Expr) -> None:
        """After all numbers are stored: let all threads see them. Holds a barrier."""

    def scores(self, keys: Expr, place: Place, scores: Expr) -> None:
        """scores[q] = query q . the key at `place`; `scores` is the thread's own."""

    def load_value(self, values: Expr, place: Place, pair: Expr) -> tuple[Expr, ...]:
        """The words that hold dimensions 2 * pair and 2 * pair + 1 of the value at `place`."""

    def value(self, words: tuple[Expr, ...], pair: Expr) -> tuple[Expr, Expr]:
        """The two dimensions of such words, float32."""


def half_bits(value: Expr) -> Expr:
    """The float16 of a float32 as uint32. What float16 cannot hold becomes its largest number, and NaN too: a key that
    a row does not see has weight 0 there, and 0 times its value has to be 0, whatever a later row computed.
    """
    value = bind(select(value < f32(_LARGEST), value, f32(_LARGEST)))
    value = bind(select(value > f32(-_LARGEST), value, f32(-_LARGEST)))
    return bind(cast("uint32", reinterpret("uint16", cast("float16", value))))
