"""A layer's K and V caches: which slot a position has, and the type that they are stored in.

A cache holds the tokens of each KV head one behind the other, in tiles of 64. Its capacity in tokens is a multiple of
256: position p is in slot p mod capacity, so a cache that is smaller than the context is a ring. Knows nothing of what
is inside a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from dflashc.targets.cpu.builder import Expr, bind
from dflashc.targets.cpu.kernels.kv_f16 import Float16
from dflashc.targets.cpu.kernels.kv_q8_0 import Q8
from dflashc.targets.cpu.kernels.kv_tile import TILE, KvType, Place
from dflashc.targets.cpu.traits import Traits

KV_TYPES: dict[str, Callable[[Traits, int], KvType]] = {"f16": Float16, "q8_0": Q8}


def kv_type(name: str, traits: Traits, size: int) -> KvType:
    """The K/V type `name` for heads of `size` elements."""
    return KV_TYPES[name](traits, size)


@dataclass(frozen=True)
class KvCache:
    """K and V of one layer, or of some layers whose heads are counted on."""

    kv: KvType
    keys: Expr
    values: Expr
    capacity: Expr

    def place(self, head: Expr, position: Expr) -> Place:
        """Where the token at `position` is, in either cache."""
        slot = bind(tirx.truncmod(position, self.capacity))
        in_tile = bind(tirx.truncmod(slot, TILE))
        tiles = tirx.truncdiv(head * self.capacity + slot - in_tile, TILE)
        return Place(bind(tiles * self.kv.tile_elements), in_tile)
