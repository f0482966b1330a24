"""Keys and values as ggml's q8_0: 32 values along the head share a float16 scale, value = scale * code.

K tile: uint8 [64 / L][D / 4][L][4], code + 128, four dimensions of a key side by side for integer dot products.
V tile: int8 [64][D], the codes. Behind either, the scales: float16 [D / 32][64].

Scores are exact integers per 32 dimensions, for which the queries are quantised likewise, with float32 scales (q8_32 of
`activation`); they meet floats once per 32. Values meet float32 weights, which take the scales in first.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, cast, const, load, local, maximum, reduce_pairs, reinterpret, store
from dflashc.targets.cpu.kernels.activation import emit_quantise
from dflashc.targets.cpu.kernels.dot import block_dots
from dflashc.targets.cpu.kernels.kv_tile import (
    TILE,
    Place,
    Tile,
    emit_prefetch,
    emit_products,
    register_block,
    row_blocks,
)
from dflashc.targets.cpu.kernels.vector_math import absolute, half_to_float, select
from dflashc.targets.cpu.traits import Traits, broadcast, intrinsic

BLOCK = 32
_OFFSET = 128
_TINY = 1e-36  # a block below it is stored as zeros; its scale as float16 is 0 anyway
_BELOW_HALF = 0.49999997  # the largest float32 below 1/2: added to 0.49999997 it must not give 1


class Q8:
    """See `kv_tile.KvType`."""

    dtype = "uint8"

    def __init__(self, traits: Traits, size: int) -> None:
        self.traits, self.size = traits, size
        self.tile_elements = tile_bytes(size)

    def write_key(self, key: Expr, cache: Expr, place: Place) -> None:
        lanes, size = self.traits.lanes, self.size
        codes = local(size, "uint8")

        def keep(i: Expr, code: Expr) -> None:
            store(codes, i, cast(f"uint8x{lanes}", code + const(_OFFSET, self.traits.i32)), lanes)

        self._quantise(key, tirx.const(0, "int64"), cache, place, keep)
        lane = bind(tirx.truncmod(place.slot, lanes))
        start = bind(place.tile + (place.slot - lane) * size + lane * 4)
        with T.serial(0, size // 4) as quad:
            store(cache, start + quad * (4 * lanes), load(codes, quad * 4, 4), 4)

    def write_value(self, source: Expr, offset: Expr, cache: Expr, place: Place) -> None:
        lanes = self.traits.lanes
        start = bind(place.tile + place.slot * self.size)

        def keep(i: Expr, code: Expr) -> None:
            store(cache, start + i, reinterpret(f"uint8x{lanes}", cast(f"int8x{lanes}", code)), lanes)

        self._quantise(source, offset, cache, place, keep)

    def products(self, rows: int) -> Q8Products:
        return Q8Products(self.traits, rows, self.size)

    def _quantise(self, source: Expr, offset: Expr, cache: Expr, place: Place,
                  keep: Callable[[Expr, Expr], None]) -> None:
        """Store the scales of source[offset:][:D] and call `keep(i, codes)` for every vector of int32 codes.

        As ggml's quantize_row_q8_0_ref: d = max|x| / 127, code = x * (1 / d) to the nearest integer, halves away from
        zero; d is stored as float16.
        """
        traits, lanes = self.traits, self.traits.lanes
        with T.serial(0, self.size // BLOCK) as block:
            first = bind(block * BLOCK)
            loaded = [bind(load(source, offset + first + c, lanes)) for c in range(0, BLOCK, lanes)]
            largest = bind(intrinsic("float32", "llvm.vector.reduce.fmax",
                                     reduce_pairs([bind(absolute(x)) for x in loaded], maximum)))
            scale = bind(largest / const(127.0, "float32"))
            usable = largest > const(_TINY, "float32")
            inverse = bind(select(usable, const(1.0, "float32") / scale, const(0.0, "float32")))
            at = place.tile + TILE * self.size + (block * TILE + place.slot) * 2
            store(cache, at, reinterpret("uint8x2", cast("float16", scale)), 2)
            for c, x in zip(range(0, BLOCK, lanes), loaded, strict=True):
                keep(first + c, bind(_round_half_away(traits, bind(x * broadcast(inverse, lanes)))))


def tile_bytes(size: int) -> int:
    """Bytes of a tile: codes and scales."""
    return TILE * (size + size // BLOCK * 2)


def _round_half_away(traits: Traits, x: Expr) -> Expr:
    """The nearest integer, int32 lanes; halves go away from zero. |x| must stay below 2**22."""
    half = intrinsic(traits.f32, "llvm.copysign", const(_BELOW_HALF, traits.f32), x)
    return cast(traits.i32, x + half)


class Q8Products:
    """See `kv_tile.Products`."""

    def __init__(self, traits: Traits, rows: int, size: int) -> None:
        self.traits, self.rows, self.size = traits, rows, size
        self.query = local(rows * size, "float32")
        blocks = rows * size // BLOCK
        self._codes = local(rows * size, "int8")
        self._scale, self._sum = local(blocks, "float32"), local(blocks, "int32")

    def take_queries(self) -> None:
        form = self._codes, self._scale, self._sum
        emit_quantise(self.traits, "q8_32", self.query, 0, self.rows * self.size, form, 0)

    def scores(self, tile: Tile, score: Expr) -> None:
        traits, lanes, size = self.traits, self.traits.lanes, self.size
        vectors, blocks = TILE // lanes, size // BLOCK
        most = 12 if lanes == 16 else 5 if traits.dot != "none" else 2  # with a sum in float32 and one in int32 each
        block_rows = -(-self.rows // -(-self.rows // most))
        sums = local(block_rows * lanes, "float32")
        share = tile_bytes(BLOCK) // vectors  # of the tile's values, to prefetch at each step

        def emit(first: Expr, rows: int) -> None:
            with T.serial(0, vectors) as vector:
                for r in range(rows):
                    store(sums, r * lanes, const(0, traits.f32), lanes)
                with T.serial(0, blocks) as block:
                    emit_prefetch(tile.values, "uint8", tile.offset + (vector * blocks + block) * share, share)
                    start = bind(tile.offset + (vector * size + block * BLOCK) * lanes)
                    quads = (bind(load(tile.keys, start + q * (4 * lanes), 4 * lanes)) for q in range(BLOCK // 4))
                    rows_start = [bind((first + r) * size + block * BLOCK) for r in range(rows)]
                    dots = block_dots(traits, quads, 255, self._codes, rows_start)
                    scale = _scales(traits, tile.keys, tile.offset, size, block, vector * lanes)
                    for r in range(rows):
                        at = bind((first + r) * blocks + block)
                        offset = broadcast(load(self._sum, at) * tirx.const(_OFFSET, "int32"), lanes)
                        factor = scale * broadcast(load(self._scale, at), lanes)
                        product = traits.fma(cast(traits.f32, dots[r] - offset), factor, load(sums, r * lanes, lanes))
                        store(sums, r * lanes, product, lanes)
                for r in range(rows):
                    store(score, (first + r) * TILE + vector * lanes, load(sums, r * lanes, lanes), lanes)

        row_blocks(self.rows, block_rows, emit)

    def values(self, tile: Tile, weight: Expr, decay: Expr, value: Expr) -> None:
        traits, lanes, size = self.traits, self.traits.lanes, self.size
        vectors, per_block = size // lanes, BLOCK // lanes
        block_rows, block_vectors = register_block(traits, self.rows, vectors, per_block)
        blocks = block_vectors // per_block
        sums = local(block_rows * block_vectors * lanes, "float32")
        scaled = local(block_rows * blocks * TILE, "float32")
        share = tile_bytes(size) // TILE * block_vectors // vectors  # of the next keys, to prefetch at each step

        def emit(first: Expr, rows: int) -> None:
            with T.serial(0, vectors // block_vectors) as group:
                column = bind(group * (block_vectors * lanes))
                for b in range(blocks):
                    with T.serial(0, TILE // lanes) as i:
                        scale = _scales(traits, tile.values, tile.offset, size, group * blocks + b, i * lanes)
                        for r in range(rows):
                            unscaled = load(weight, (first + r) * TILE + i * lanes, lanes)
                            store(scaled, (r * blocks + b) * TILE + i * lanes, unscaled * scale, lanes)
                cells = [(r, j, (r * block_vectors + j) * lanes) for r in range(rows) for j in range(block_vectors)]
                for r, j, at in cells:
                    before = load(value, (first + r) * size + column + j * lanes, lanes)
                    store(sums, at, before * load(decay, (first + r) * lanes, lanes), lanes)
                with T.serial(0, tile.count) as key:
                    start = bind(tile.offset + key * size + column)
                    codes = [self._values(tile.values, start + j * lanes) for j in range(block_vectors)]
                    emit_prefetch(tile.keys, "uint8", tile.next_offset + (group * TILE + key) * share, share)
                    for r in range(rows):
                        for b in range(blocks):
                            emit_products(traits, sums, r, block_vectors, load(scaled, (r * blocks + b) * TILE + key),
                                          codes[b * per_block :][:per_block], b * per_block)
                for r, j, at in cells:
                    store(value, (first + r) * size + column + j * lanes, load(sums, at, lanes), lanes)

        row_blocks(self.rows, block_rows, emit)

    def _values(self, buffer: Expr, offset: Expr) -> Expr:
        """A vector of codes as float32."""
        lanes = self.traits.lanes
        codes = reinterpret(f"int8x{lanes}", load(buffer, offset, lanes))
        return bind(cast(self.traits.f32, cast(self.traits.i32, codes)))


def _scales(traits: Traits, cache: Expr, tile: Expr, size: int, block: Expr, slot: Expr) -> Expr:
    """Scales of block number `block` of L keys or values from `slot` on, as float32."""
    start = bind(tile + TILE * size + (block * TILE + slot) * 2)
    bits = reinterpret(f"uint16x{traits.lanes}", load(cache, start, 2 * traits.lanes))
    return bind(half_to_float(traits, bind(bits)))
