"""Keys and values as float16.

K tile: float16 [64 / L][D][L], L = lanes: a vector is L keys of one dimension, so scores need no horizontal sums.
V tile: float16 [64][D].
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, cast, const, load, local, reinterpret, store
from dflashc.targets.cpu.kernels.kv_tile import (
    TILE,
    Place,
    Tile,
    emit_prefetch,
    emit_products,
    register_block,
    row_blocks,
)
from dflashc.targets.cpu.kernels.vector_math import half_to_float
from dflashc.targets.cpu.traits import Traits


class Float16:
    """See `kv_tile.KvType`."""

    dtype = "float16"

    def __init__(self, traits: Traits, size: int) -> None:
        self.traits, self.size = traits, size
        self.tile_elements = TILE * size

    def write_key(self, key: Expr, cache: Expr, place: Place) -> None:
        lanes, size = self.traits.lanes, self.size
        half = local(size, "float16")
        with T.serial(0, size // lanes) as i:
            store(half, i * lanes, cast(f"float16x{lanes}", load(key, i * lanes, lanes)), lanes)
        lane = bind(tirx.truncmod(place.slot, lanes))
        start = bind(place.tile + (place.slot - lane) * size + lane)
        with T.serial(0, size) as i:
            store(cache, start + i * lanes, load(half, i))

    def write_value(self, source: Expr, offset: Expr, cache: Expr, place: Place) -> None:
        lanes = self.traits.lanes
        start = bind(place.tile + place.slot * self.size)
        with T.serial(0, self.size // lanes) as i:
            value = load(source, offset + i * lanes, lanes)
            store(cache, start + i * lanes, cast(f"float16x{lanes}", value), lanes)

    def products(self, rows: int) -> Float16Products:
        return Float16Products(self.traits, rows, self.size)


class Float16Products:
    """See `kv_tile.Products`; keys and values meet float32 queries and weights as float32."""

    def __init__(self, traits: Traits, rows: int, size: int) -> None:
        self.traits, self.rows, self.size = traits, rows, size
        self.query = local(rows * size, "float32")

    def take_queries(self) -> None:
        pass

    def _load(self, buffer: Expr, offset: Expr) -> Expr:
        bits = reinterpret(f"uint16x{self.traits.lanes}", load(buffer, offset, self.traits.lanes))
        return bind(half_to_float(self.traits, bind(bits)))

    def scores(self, tile: Tile, score: Expr) -> None:
        traits, lanes, size = self.traits, self.traits.lanes, self.size
        vectors = TILE // lanes
        block_rows, block_vectors = register_block(traits, self.rows, vectors)
        sums = local(block_rows * block_vectors * lanes, "float32")
        share = TILE * block_vectors // vectors  # of the tile's values, to prefetch at each step

        def emit(first: Expr, rows: int) -> None:
            cells = [(r, j) for r in range(rows) for j in range(block_vectors)]
            with T.serial(0, vectors // block_vectors) as group:
                for r, j in cells:
                    store(sums, (r * block_vectors + j) * lanes, const(0, traits.f32), lanes)
                start = bind(tile.offset + group * (block_vectors * size * lanes))
                with T.serial(0, size) as d:
                    keys = [self._load(tile.keys, start + (j * size + d) * lanes) for j in range(block_vectors)]
                    emit_prefetch(tile.values, "float16", tile.offset + (group * size + d) * share, share)
                    for r in range(rows):
                        emit_products(traits, sums, r, block_vectors, load(self.query, (first + r) * size + d), keys)
                for r, j in cells:
                    value = load(sums, (r * block_vectors + j) * lanes, lanes)
                    store(score, (first + r) * TILE + (group * block_vectors + j) * lanes, value, lanes)

        row_blocks(self.rows, block_rows, emit)

    def values(self, tile: Tile, weight: Expr, decay: Expr, value: Expr) -> None:
        traits, lanes, size = self.traits, self.traits.lanes, self.size
        vectors = size // lanes
        block_rows, block_vectors = register_block(traits, self.rows, vectors)
        sums = local(block_rows * block_vectors * lanes, "float32")
        share = size * block_vectors // vectors  # of the next keys, to prefetch at each step

        def emit(first: Expr, rows: int) -> None:
            with T.serial(0, vectors // block_vectors) as group:
                column = bind(group * (block_vectors * lanes))
                cells = [(r, j, (r * block_vectors + j) * lanes) for r in range(rows) for j in range(block_vectors)]
                for r, j, at in cells:
                    before = load(value, (first + r) * size + column + j * lanes, lanes)
                    store(sums, at, before * load(decay, (first + r) * lanes, lanes), lanes)
                with T.serial(0, tile.count) as key:
                    start = bind(tile.offset + key * size + column)
                    loaded = [self._load(tile.values, start + j * lanes) for j in range(block_vectors)]
                    emit_prefetch(tile.keys, "float16", tile.next_offset + (group * TILE + key) * share, share)
                    for r in range(rows):
                        emit_products(traits, sums, r, block_vectors, load(weight, (first + r) * TILE + key), loaded)
                for r, j, at in cells:
                    store(value, (first + r) * size + column + j * lanes, load(sums, at, lanes), lanes)

        row_blocks(self.rows, block_rows, emit)
