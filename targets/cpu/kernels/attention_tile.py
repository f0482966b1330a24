"""Softmax attention of some query rows over tiles of 64 keys: scores, online softmax, weighted values, merging.

Every query row is computed in an order that depends on nothing but its own visible keys: a tile that a row does not see
leaves the row's state as it was, to the last bit. So rows can share tiles in any combination. Knows nothing of where
queries come from, nor of which keys a row sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, cast, const, load, local, reinterpret, store
from dflashc.targets.cpu.kernels.vector_math import ROUND_MAGIC, ROUND_MAGIC_BITS, half_to_float
from dflashc.targets.cpu.traits import Traits, broadcast

TILE = 64
PART = 256
"""Keys of a part: the unit that is computed on its own and merged with others in the order of their positions."""

_LINE = 32  # float16 elements of a cache line
_LOWEST = -3.0e38  # a maximum below any score; finite, so that differences are numbers
_UNSEEN = float("-inf")  # the score of a key that is not seen: exp gives 0, even if the row has seen no key at all


@dataclass(frozen=True)
class Tile:
    """64 keys and values in memory.

    Attributes
    ----------
    keys, values : Expr
        float16 buffers: keys as [64 / L][D][L], values as [64][D].
    key_offset, value_offset : Expr
        Their first elements.
    count : Expr
        Keys up to the last one that any row sees, 1..64; values from there on are not read.
    next_key_offset : Expr
        First element of the keys to read next.
    """

    keys: Expr
    values: Expr
    key_offset: Expr
    value_offset: Expr
    count: Expr
    next_key_offset: Expr


def _load_half(traits: Traits, buffer: Expr, offset: Expr) -> Expr:
    return bind(half_to_float(traits, bind(reinterpret(f"uint16x{traits.lanes}", load(buffer, offset, traits.lanes)))))


def emit_prefetch(buffer: Expr, offset: Expr, elements: int) -> None:
    """Fetch float16 elements [offset, offset + elements) into the second-level cache.

    Each 64 keys of a head are some pages of their own, too short for the CPU's own prefetching.
    """
    for line in range(0, elements, _LINE):
        address = tirx.address_of(load(buffer, offset + line))
        read, second_level, data = (tirx.const(value, "int32") for value in (0, 2, 1))
        T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, read, second_level, data))


def _exp(traits: Traits, x: Expr) -> Expr:
    """exp(x) for x <= 0, within 2 ulp; 0 below -87.7, 1 at 0. Two thirds of the general function's operations.

    exp(x) = 2**n * exp(f), |f| <= ln(2)/2; coefficients of Cephes' expf (Moshier, 1984).
    """
    f32, i32 = traits.f32, traits.i32
    x = bind(tirx.max(const(-88.0, f32), x))  # n >= -127, for which the bits of 2**n are those of 0
    bits = bind(reinterpret(i32, traits.fma(x, const(1.4426950408889634, f32), const(ROUND_MAGIC, f32))))
    n = bind(cast(f32, bits - const(ROUND_MAGIC_BITS, i32)))
    f = bind(traits.fma(n, const(-0.693359375, f32), x))
    f = bind(traits.fma(n, const(2.12194440e-4, f32), f))
    p = const(1.9875691500e-4, f32)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = bind(traits.fma(p, f, const(coefficient, f32)))
    p = traits.fma(p, bind(f * f), f) + const(1, f32)
    return bind(p * reinterpret(f32, tirx.shift_left(bits + const(127, i32), const(23, i32))))  # the magic shifts out


def across(traits: Traits, vector: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """All lanes combined, in every lane; the order is a fixed butterfly."""
    distance = traits.lanes // 2
    while distance:
        swapped = tirx.Shuffle([vector], [tirx.const(i ^ distance, "int32") for i in range(traits.lanes)])
        vector = bind(combine(vector, swapped))
        distance //= 2
    return vector


def _block(traits: Traits, rows: int, vectors: int) -> tuple[int, int]:
    """Query rows and vectors of a register block: the fewest operations without spilling an accumulator."""
    registers = 32 if traits.lanes == 16 else 16 if traits.dot != "none" else 8  # the generic level halves vectors

    def fits(r: int, c: int) -> bool:  # accumulators, vectors that several rows share, a broadcast
        return r * c + (c if r > 1 else 1) + 1 <= registers

    def step(r: int, c: int) -> int:  # broadcasts, conversions to float32 (dear), products (8 in flight at least)
        return r + 2 * c + max(r * c, 8)

    def cost(block: tuple[int, int]) -> int:
        r, c = block
        rest = rows % r
        return vectors // c * (rows // r * step(r, c) + (step(rest, c) if rest else 0))

    return min(((r, c) for c in range(vectors, 0, -1) if vectors % c == 0 for r in range(min(rows, 12), 0, -1)
                if fits(r, c)), key=cost)


def _blocked(rows: int, size: int, emit: Callable[[Expr, int], None]) -> None:
    """`emit(first row, number of rows)` for blocks of `size` rows, and for what is left."""
    full, rest = divmod(rows, size)
    if full:
        with T.serial(0, full) as block:
            emit(block * size, size)
    if rest:
        emit(tirx.const(full * size, "int64"), rest)


def _emit_products(traits: Traits, sums: Expr, scalars: list[Expr], vectors: list[Expr]) -> None:
    """sums[r][j] += scalars[r] * vectors[j]. Each scalar is broadcast right before its use, to spare registers."""
    lanes = traits.lanes
    for r, scalar in enumerate(scalars):
        factor = bind(broadcast(scalar, lanes))
        for j, vector in enumerate(vectors):
            at = (r * len(vectors) + j) * lanes
            store(sums, at, traits.fma(factor, vector, load(sums, at, lanes)), lanes)


class State:
    """What is known of `rows` query rows of `size` dimensions after some keys, in a thread's own memory.

    Attributes
    ----------
    value : float32 (rows, size), the sum of exp(score - maximum) * V
    maximum : float32 (rows, lanes), the highest score, in every lane
    total : float32 (rows, lanes), the sum of exp(score - maximum)
    """

    def __init__(self, traits: Traits, rows: int, size: int) -> None:
        self.traits, self.rows, self.size = traits, rows, size
        self.value = local(rows * size, "float32")
        self.maximum = local(rows * traits.lanes, "float32")
        self.total = local(rows * traits.lanes, "float32")

    def reset(self) -> None:
        """No key seen yet."""
        lanes, f32 = self.traits.lanes, self.traits.f32
        with T.serial(0, self.rows) as row:
            store(self.maximum, row * lanes, const(_LOWEST, f32), lanes)
            store(self.total, row * lanes, const(0, f32), lanes)
        with T.serial(0, self.rows * self.size // lanes) as i:
            store(self.value, i * lanes, const(0, f32), lanes)


class Softmax(State):
    """Online softmax over tiles. `total` is spread over the lanes until `finish`.

    Attributes
    ----------
    query : float32 (rows, size), scaled; to be filled in by the caller
    """

    def __init__(self, traits: Traits, rows: int, size: int) -> None:
        super().__init__(traits, rows, size)
        self.query = local(rows * size, "float32")
        self._decay = local(rows * traits.lanes, "float32")  # factor of what was known before the tile
        self._score = local(rows * TILE, "float32")

    def tile(self, tile: Tile, visible: Callable[[Expr], tuple[Expr, Expr]]) -> None:
        """Take in one tile. `visible(row)` gives the row's first and last key, int32, counted from the tile's start."""
        self._emit_scores(tile)
        self._emit_weights(visible)
        self._emit_values(tile)

    def finish(self) -> None:
        """Sum `total` over the lanes: afterwards each lane holds the sum."""
        lanes = self.traits.lanes
        with T.serial(0, self.rows) as row:
            total = bind(load(self.total, row * lanes, lanes))
            store(self.total, row * lanes, across(self.traits, total, lambda a, b: a + b), lanes)

    def _emit_scores(self, tile: Tile) -> None:
        traits, lanes, size = self.traits, self.traits.lanes, self.size
        vectors = TILE // lanes
        block_rows, block_vectors = _block(traits, self.rows, vectors)
        sums = local(block_rows * block_vectors * lanes, "float32")
        share = TILE * block_vectors // vectors  # of the tile's values, to prefetch at each step

        def emit(first: Expr, rows: int) -> None:
            cells = [(r, j) for r in range(rows) for j in range(block_vectors)]
            with T.serial(0, vectors // block_vectors) as group:
                for r, j in cells:
                    store(sums, (r * block_vectors + j) * lanes, const(0, traits.f32), lanes)
                start = bind(tile.key_offset + group * (block_vectors * size * lanes))
                with T.serial(0, size) as d:
                    keys = [_load_half(traits, tile.keys, start + (j * size + d) * lanes) for j in range(block_vectors)]
                    emit_prefetch(tile.values, tile.value_offset + (group * size + d) * share, share)
                    _emit_products(traits, sums, [load(self.query, (first + r) * size + d) for r in range(rows)], keys)
                for r, j in cells:
                    value = load(sums, (r * block_vectors + j) * lanes, lanes)
                    store(self._score, (first + r) * TILE + (group * block_vectors + j) * lanes, value, lanes)

        _blocked(self.rows, block_rows, emit)

    def _emit_weights(self, visible: Callable[[Expr], tuple[Expr, Expr]]) -> None:
        """Scores to exp(score - maximum), 0 where the row does not see the key; update maximum and total."""
        traits, lanes = self.traits, self.traits.lanes
        order = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), lanes)
        with T.serial(0, self.rows) as row:
            first, last = (bind(key) for key in visible(row))
            own = bind(row * lanes)
            before = bind(load(self.maximum, own, lanes))
            with T.serial(0, TILE // lanes) as i:
                at = bind(row * TILE + i * lanes)
                # unsigned, so that keys before `first` wrap around to huge numbers
                keys = cast(f"uint32x{lanes}", order + broadcast(cast("int32", i * lanes) - first, lanes))
                seen = keys <= broadcast(cast("uint32", last - first), lanes)
                score = bind(tirx.Select(seen, load(self._score, at, lanes), const(_UNSEEN, traits.f32)))
                store(self._score, at, score, lanes)
                store(self.maximum, own, tirx.max(load(self.maximum, own, lanes), score), lanes)
            store(self._decay, own, before, lanes)
            store(self.maximum, own, across(traits, bind(load(self.maximum, own, lanes)), tirx.max), lanes)
        with T.serial(0, self.rows) as row:
            own = bind(row * lanes)
            before = bind(load(self._decay, own, lanes))
            maximum = bind(load(self.maximum, own, lanes))
            decay = bind(_exp(traits, bind(before - maximum)))
            store(self._decay, own, decay, lanes)
            store(self.total, own, load(self.total, own, lanes) * decay, lanes)
            with T.serial(0, TILE // lanes) as i:
                at = bind(row * TILE + i * lanes)
                weight = bind(_exp(traits, bind(load(self._score, at, lanes) - maximum)))
                store(self._score, at, weight, lanes)
                store(self.total, own, load(self.total, own, lanes) + weight, lanes)

    def _emit_values(self, tile: Tile) -> None:
        traits, lanes, size = self.traits, self.traits.lanes, self.size
        vectors = size // lanes
        block_rows, block_vectors = _block(traits, self.rows, vectors)
        sums = local(block_rows * block_vectors * lanes, "float32")
        share = size * block_vectors // vectors  # of the next keys, to prefetch at each step

        def emit(first: Expr, rows: int) -> None:
            with T.serial(0, vectors // block_vectors) as group:
                column = bind(group * (block_vectors * lanes))
                cells = [(r, j, (r * block_vectors + j) * lanes) for r in range(rows) for j in range(block_vectors)]
                for r, j, at in cells:
                    value = load(self.value, (first + r) * size + column + j * lanes, lanes)
                    store(sums, at, value * load(self._decay, (first + r) * lanes, lanes), lanes)
                with T.serial(0, tile.count) as key:
                    start = bind(tile.value_offset + key * size + column)
                    values = [_load_half(traits, tile.values, start + j * lanes) for j in range(block_vectors)]
                    emit_prefetch(tile.keys, tile.next_key_offset + (group * TILE + key) * share, share)
                    _emit_products(traits, sums, [load(self._score, (first + r) * TILE + key) for r in range(rows)],
                                   values)
                for r, j, at in cells:
                    store(self.value, (first + r) * size + column + j * lanes, load(sums, at, lanes), lanes)

        _blocked(self.rows, block_rows, emit)


class Merged(State):
    """Parts merged one after the other: m' = max(m, m_p), total' = total * exp(m - m') + total_p * exp(m_p - m'), and
    value likewise. `total` is the same in every lane.
    """

    def see_sink(self, row: Expr, logit: Expr) -> None:
        """Let a row that has seen nothing yet see an attention sink: a score without a value."""
        traits, lanes = self.traits, self.traits.lanes
        highest = broadcast(tirx.max(logit, const(_LOWEST, "float32")), lanes)
        store(self.maximum, row * lanes, highest, lanes)
        store(self.total, row * lanes, const(1, traits.f32), lanes)

    def add(self, row: Expr, maximum: Expr, total: Expr, value: Callable[[Expr], Expr]) -> None:
        """Merge one part into `row`: maximum and total as vectors of equal lanes, value(i) the vector from i on."""
        traits, lanes = self.traits, self.traits.lanes
        before = bind(load(self.maximum, row * lanes, lanes))
        after = bind(tirx.max(before, maximum))
        old, new = bind(_exp(traits, before - after)), bind(_exp(traits, maximum - after))
        store(self.maximum, row * lanes, after, lanes)
        store(self.total, row * lanes, traits.fma(load(self.total, row * lanes, lanes), old, total * new), lanes)
        with T.serial(0, self.size // lanes) as i:
            at = row * self.size + i * lanes
            store(self.value, at, traits.fma(load(self.value, at, lanes), old, value(i * lanes) * new), lanes)

    def result(self, row: Expr, emit: Callable[[Expr, Expr], None]) -> None:
        """`emit(i, vector)` for the row's attention output, in steps of one vector."""
        lanes = self.traits.lanes
        inverse = bind(const(1, self.traits.f32) / load(self.total, row * lanes, lanes))
        with T.serial(0, self.size // lanes) as i:
            emit(i * lanes, load(self.value, row * self.size + i * lanes, lanes) * inverse)
