"""Softmax attention of some query rows over tiles of 64 keys: the online softmax of their scores, and merging.

Every query row is computed in an order that depends on nothing but its own visible keys: a tile that a row does not see
leaves the row's state as it was, to the last bit. So rows can share tiles in any combination. Knows nothing of where
queries come from, of how keys are stored, nor of which keys a row sees.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, cast, const, load, local, reinterpret, store
from dflashc.targets.cpu.kernels.kv_tile import TILE, KvType, Tile
from dflashc.targets.cpu.kernels.vector_math import ROUND_MAGIC, ROUND_MAGIC_BITS
from dflashc.targets.cpu.traits import Traits, broadcast

PART = 256
"""Keys of a part: the unit that is computed on its own and merged with others in the order of their positions."""

_LOWEST = -3.0e38  # a maximum below any score; finite, so that differences are numbers
_UNSEEN = float("-inf")  # the score of a key that is not seen: exp gives 0, even if the row has seen no key at all


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
    """Online softmax over tiles of a K/V type. `total` is spread over the lanes until `finish`.

    Attributes
    ----------
    products : Products
        Holds the queries.
    """

    def __init__(self, kv: KvType, rows: int) -> None:
        traits = kv.traits
        super().__init__(traits, rows, kv.size)
        self.products = kv.products(rows)
        self._decay = local(rows * traits.lanes, "float32")  # factor of what was known before the tile
        self._score = local(rows * TILE, "float32")

    def tile(self, tile: Tile, visible: Callable[[Expr], tuple[Expr, Expr]]) -> None:
        """Take in one tile. `visible(row)` gives the row's first and last key, int32, counted from the tile's start."""
        self.products.scores(tile, self._score)
        self._emit_weights(visible)
        self.products.values(tile, self._score, self._decay, self.value)

    def finish(self) -> None:
        """Sum `total` over the lanes: afterwards each lane holds the sum."""
        lanes = self.traits.lanes
        with T.serial(0, self.rows) as row:
            total = bind(load(self.total, row * lanes, lanes))
            store(self.total, row * lanes, across(self.traits, total, lambda a, b: a + b), lanes)

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
