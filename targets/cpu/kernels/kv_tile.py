"""What all K/V types share: tiles of 64 keys and values, and the register blocks that query rows meet them in.

A type decides what is inside a tile, and brings the products over it; `kv_f16` and `kv_q8_0` are the types. Knows
nothing of softmax, nor of where a tile lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, load, store
from dflashc.targets.cpu.traits import Traits, broadcast

TILE = 64
_LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Place:
    """Where a token's key or value lies: the first element of its tile in the cache, and its slot in there, 0..63."""

    tile: Expr
    slot: Expr


@dataclass(frozen=True)
class Tile:
    """64 keys and values in memory.

    Attributes
    ----------
    keys, values : Expr
        The caches, buffers of the type's dtype.
    offset : Expr
        First element of the tile, in either.
    count : Expr
        Keys up to the last one that any row sees, 1..64; values from there on are not read.
    next_offset : Expr
        First element of the tile to read next.
    """

    keys: Expr
    values: Expr
    offset: Expr
    count: Expr
    next_offset: Expr


class Products(Protocol):
    """Scores and weighted values of some query rows over tiles.

    Attributes
    ----------
    query : float32 (rows, D), scaled; to be filled in by the caller, who then calls `take_queries`
    """

    query: Expr

    def take_queries(self) -> None:
        """Prepare the queries for the products."""

    def scores(self, tile: Tile, score: Expr) -> None:
        """score[row][key], float32 (rows, 64) = query . key."""

    def values(self, tile: Tile, weight: Expr, decay: Expr, value: Expr) -> None:
        """value[row] (rows, D) = decay[row] * value[row] + the sum of weight[row][key] * V[key] over `tile.count` keys.

        `weight` is float32 (rows, 64), `decay` float32 (rows, lanes) with equal lanes.
        """


class KvType(Protocol):
    """How keys and values are stored.

    Attributes
    ----------
    dtype : str
        Of the caches' elements.
    tile_elements : int
        Elements of a tile, of either cache.
    """

    traits: Traits
    size: int
    dtype: str
    tile_elements: int

    def write_key(self, key: Expr, cache: Expr, place: Place) -> None:
        """Store the float32 vector key[:D]."""

    def write_value(self, source: Expr, offset: Expr, cache: Expr, place: Place) -> None:
        """Store source[offset:][:D]."""

    def products(self, rows: int) -> Products:
        """Products of `rows` query rows."""


def emit_prefetch(buffer: Expr, dtype: str, offset: Expr, elements: int) -> None:
    """Fetch elements [offset, offset + elements) into the second-level cache.

    Each 64 keys of a head are some pages of their own, too short for the CPU's own prefetching.
    """
    for line in range(0, elements, _LINE // {"float16": 2, "uint8": 1}[dtype]):
        address = tirx.address_of(load(buffer, offset + line))
        read, second_level, data = (tirx.const(value, "int32") for value in (0, 2, 1))
        T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, read, second_level, data))


def register_block(traits: Traits, rows: int, vectors: int, multiple: int = 1) -> tuple[int, int]:
    """Query rows and vectors of a register block: the fewest operations without spilling an accumulator.

    The number of vectors divides `vectors`, and is a multiple of `multiple`.
    """
    registers = 32 if traits.lanes == 16 else 16 if traits.dot != "none" else 8  # the generic level halves vectors

    def fits(r: int, c: int) -> bool:  # accumulators, vectors that several rows share, a broadcast
        return r * c + (c if r > 1 else 1) + 1 <= registers

    def step(r: int, c: int) -> int:  # broadcasts, conversions to float32 (dear), products (8 in flight at least)
        return r + 2 * c + max(r * c, 8)

    def cost(block: tuple[int, int]) -> int:
        r, c = block
        rest = rows % r
        return vectors // c * (rows // r * step(r, c) + (step(rest, c) if rest else 0))

    widths = [c for c in range(vectors, 0, -1) if vectors % c == 0 and c % multiple == 0]
    blocks = [(r, c) for c in widths for r in range(min(rows, 12), 0, -1)]
    return min([b for b in blocks if fits(*b)] or blocks[-1:], key=cost)


def row_blocks(rows: int, size: int, emit: Callable[[Expr, int], None]) -> None:
    """`emit(first row, number of rows)` for blocks of `size` rows, and for what is left."""
    full, rest = divmod(rows, size)
    if full:
        with T.serial(0, full) as block:
            emit(block * size, size)
    if rest:
        emit(tirx.const(full * size, "int64"), rest)


def emit_products(traits: Traits, sums: Expr, row: int, width: int, scalar: Expr, vectors: Sequence[Expr],
                  column: int = 0) -> None:
    """sums[row][column + j] += scalar * vectors[j], sums (rows, width) vectors.

    To be called right after the scalar is known, for a broadcast takes a register.
    """
    lanes = traits.lanes
    factor = bind(broadcast(scalar, lanes))
    for j, vector in enumerate(vectors):
        at = (row * width + column + j) * lanes
        store(sums, at, traits.fma(factor, vector, load(sums, at, lanes)), lanes)
