"""The inner products of matmuls: one row group of packed weights times a tile of activation rows.

One function per family of formats, all with the same result: a float32 vector per activation row, accumulated over K
in an order that depends on nothing but the format. Knows nothing of what happens to the results.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, cast, const, i64, load, local, reinterpret, store
from dflashc.targets.cpu.kernels.codes import block_quads
from dflashc.targets.cpu.kernels.dot import add_pair_products, block_dots
from dflashc.targets.cpu.kernels.tiles import Prefetch, Tile
from dflashc.targets.cpu.kernels.vector_math import half_to_float
from dflashc.targets.cpu.traits import Traits, broadcast
from dflashc.targets.packing import ALIGNMENT, BLOCK, QUADS, PackedFormat

_SUMS = 16  # elements per sum in the form q8_256


def group_stride(traits: Traits, layout: PackedFormat, columns: Expr) -> tuple[Expr, Expr]:
    """Bytes of a row group's quant plane, and from one row group to the next, for a runtime K."""
    quants = bind(tirx.floordiv(columns, i64(8)) * i64(layout.bits * traits.lanes))
    header = tirx.floordiv(columns, i64(layout.group)) * i64(layout.header_bytes * traits.lanes)
    aligned = tirx.floordiv(quants + header + i64(ALIGNMENT - 1), i64(ALIGNMENT)) * i64(ALIGNMENT)
    return quants, bind(aligned)


def row_group_products(traits: Traits, layout: PackedFormat, weight: Expr, group: Expr, activations: Sequence[Expr],
                       tile: Tile, columns: Expr) -> list[Expr]:
    """Emit the products of one row group with a tile of activation rows.

    Parameters
    ----------
    weight : buffer of uint8
    group : int64
        Index of the row group.
    activations : sequence of buffers
        The buffers of the format's activation form.
    tile : Tile
        The activation rows.

    Returns
    -------
    list of float32 vectors (L)
        One per activation row.
    """
    quants, stride = group_stride(traits, layout, columns)
    start = bind(group * stride)
    emit = {"block": _block_products, "super": _super_products, "float": _float_products}[layout.family]
    prefetch = Prefetch(traits, layout, tile, start + stride, columns)
    return emit(traits, layout, weight, start, bind(start + quants), activations, tile.rows, columns, prefetch)


def _accumulators(traits: Traits, count: int, dtype: str) -> Expr:
    """`count` vectors of zeros; constant indices, so LLVM keeps them in registers."""
    lanes = traits.lanes
    accumulators = local(count * lanes, dtype)
    for m in range(count):
        store(accumulators, m * lanes, const(0, f"{dtype}x{lanes}"), lanes)
    return accumulators


def _add_scaled(traits: Traits, accumulators: Expr, m: int, value: Expr, factor: Expr) -> None:
    lanes = traits.lanes
    store(accumulators, m * lanes, traits.fma(value, factor, load(accumulators, m * lanes, lanes)), lanes)


def _results(traits: Traits, accumulators: Expr, count: int) -> list[Expr]:
    return [bind(load(accumulators, m * traits.lanes, traits.lanes)) for m in range(count)]


def _scales(traits: Traits, weight: Expr, start: Expr, dtype: str) -> Expr:
    """L scales of a header, as float32."""
    lanes = traits.lanes
    if dtype == "float32":
        return bind(reinterpret(traits.f32, load(weight, start, 4 * lanes)))
    return half_to_float(traits, reinterpret(f"uint16x{lanes}", load(weight, start, 2 * lanes)))


def _block_products(traits: Traits, layout: PackedFormat, weight: Expr, quants: Expr, headers: Expr,
                    activations: Sequence[Expr], rows: Sequence[Expr], columns: Expr,
                    prefetch: Prefetch) -> list[Expr]:
    """Formats with a header per 32 elements: weight = scale * (code - offset) or scale * code + minimum."""
    lanes = traits.lanes
    codes, scale, total = activations
    blocks = bind(tirx.floordiv(columns, i64(BLOCK)))
    first_blocks = [bind(row * blocks) for row in rows]
    field = layout.header_bytes * lanes // (2 if layout.minimum else 1)
    accumulators = _accumulators(traits, len(rows), "float32")
    with T.serial(i64(0), blocks) as b:
        prefetch.emit(weight, b)
        index = [bind(first + b) for first in first_blocks]
        quads = block_quads(traits, layout, weight, bind(quants + b * i64(BLOCK * layout.bits // 8 * lanes)))
        dots = block_dots(traits, quads, (1 << layout.bits) - 1, codes, [bind(i * i64(BLOCK)) for i in index])
        header = bind(headers + b * i64(layout.header_bytes * lanes))
        weight_scale = _scales(traits, weight, header, layout.scale_dtype)
        if layout.minimum:
            minimum = _scales(traits, weight, header + i64(field), layout.scale_dtype)
        for m, i in enumerate(index):
            activation_scale = broadcast(load(scale, i), lanes)
            activation_sum = broadcast(load(total, i), lanes)
            if layout.minimum:
                value = bind(minimum * cast(traits.f32, activation_sum))
                value = bind(traits.fma(cast(traits.f32, dots[m]), weight_scale, value))
                _add_scaled(traits, accumulators, m, value, activation_scale)
            else:
                value = cast(traits.f32, dots[m] - activation_sum * const(layout.offset, traits.i32))
                _add_scaled(traits, accumulators, m, value, weight_scale * activation_scale)
    return _results(traits, accumulators, len(rows))


def _super_products(traits: Traits, layout: PackedFormat, weight: Expr, quants: Expr, headers: Expr,
                    activations: Sequence[Expr], rows: Sequence[Expr], columns: Expr,
                    prefetch: Prefetch) -> list[Expr]:
    """K-quants: integer scales (and minima) of 16 or 32 elements under float16 scales of 256.

    The integer part of a superblock is exact; it meets floats once per superblock.
    """
    lanes = traits.lanes
    codes, scale, sums = activations
    superblocks = bind(tirx.floordiv(columns, i64(layout.group)))
    blocks = layout.group // BLOCK
    first = [bind(row * superblocks) for row in rows]
    count = len(rows)
    accumulators = _accumulators(traits, count, "float32")
    with T.serial(i64(0), superblocks) as s:
        products = _accumulators(traits, count, "int32")
        # without minima the codes' offset is one more integer term of the products
        corrections = _accumulators(traits, count, "int32") if layout.minimum else products
        header = bind(headers + s * i64(layout.header_bytes * lanes))
        with T.serial(i64(0), i64(blocks)) as b:
            prefetch.emit(weight, bind(s * i64(blocks) + b))
            start = bind(quants + (s * i64(blocks) + b) * i64(BLOCK * layout.bits // 8 * lanes))
            starts = [bind((f + s) * i64(layout.group) + b * i64(BLOCK)) for f in first]
            scales, pair = _block_scales(traits, layout, weight, header + b * i64(2 * lanes))
            quads = block_quads(traits, layout, weight, start)
            for part, part_scale in enumerate(scales):
                size = QUADS // len(scales)
                part_quads = (next(quads) for _ in range(size))
                offsets = [bind(x + i64(part * size * 4)) for x in starts]
                dots = block_dots(traits, part_quads, (1 << layout.bits) - 1, codes, offsets, part_scale)
                for m in range(count):
                    store(products, m * lanes, load(products, m * lanes, lanes) + dots[m], lanes)
            for m, x in enumerate(starts):
                word = reinterpret("int32", load(sums, tirx.floordiv(x, i64(_SUMS)), 2))
                both = reinterpret(f"int16x{2 * lanes}", broadcast(word, lanes))
                store(corrections, m * lanes,
                      add_pair_products(traits, load(corrections, m * lanes, lanes), pair, both), lanes)
        float_scales = bind(header + i64(2 * blocks * lanes))
        weight_scale = _scales(traits, weight, float_scales, "float16")
        minimum = _scales(traits, weight, float_scales + i64(2 * lanes), "float16") if layout.minimum else None
        for m in range(count):
            product = cast(traits.f32, load(products, m * lanes, lanes))
            if minimum is None:
                value = bind(product * weight_scale)
            else:
                correction = cast(traits.f32, load(corrections, m * lanes, lanes))
                value = bind(traits.fma(product, weight_scale, bind(const(0.0, traits.f32) - correction * minimum)))
            _add_scaled(traits, accumulators, m, value, broadcast(load(scale, first[m] + s), lanes))
    return _results(traits, accumulators, count)


def _block_scales(traits: Traits, layout: PackedFormat, weight: Expr, start: Expr) -> tuple[list[Expr], Expr]:
    """A block's integer scales, int32 vectors, one or one per half; and what meets the two sums of 16: int16 pairs."""
    lanes = traits.lanes
    word, pair = traits.i32, f"int16x{2 * lanes}"
    sixteen = const(16, word)
    raw = load(weight, start, 2 * lanes)
    if layout.minimum:
        both = bind(reinterpret(word, cast(pair, raw)))
        if layout.name == "q2_k":
            scales = [bind(part & const(15, word)) for part in (both, tirx.shift_right(both, sixteen))]
            minima = tirx.shift_right(both, const(4, word)) & const(0x000F000F, word)
            return scales, bind(reinterpret(pair, minima))
        minima = both & const(-65536, word) | tirx.shift_right(both, sixteen)
        return [bind(both & const(0xFFFF, word))], bind(reinterpret(pair, minima))
    signed = bind(cast(pair, reinterpret(f"int8x{2 * lanes}", raw)))
    both = bind(reinterpret(word, signed))
    low = bind(tirx.shift_right(tirx.shift_left(both, sixteen), sixteen))
    return [low, bind(tirx.shift_right(both, sixteen))], bind(signed * const(-layout.offset, pair))


def _float_products(traits: Traits, layout: PackedFormat, weight: Expr, quants: Expr, headers: Expr,
                    activations: Sequence[Expr], rows: Sequence[Expr], columns: Expr,
                    prefetch: Prefetch) -> list[Expr]:
    """Float formats: two sums per output, over even and odd k, since one alone would wait for each FMA."""
    lanes = traits.lanes
    step = 8
    size = layout.bits // 8 * lanes
    first = [bind(row * columns) for row in rows]
    accumulators = _accumulators(traits, 2 * len(rows), "float32")
    with T.serial(i64(0), tirx.floordiv(columns, i64(BLOCK))) as b:
        prefetch.emit(weight, b)
        with T.serial(i64(0), i64(BLOCK // step)) as s:
            start = bind(b * i64(BLOCK) + s * i64(step))
            for k in range(step):
                value = _float_values(traits, layout, weight, quants + (start + i64(k)) * i64(size))
                for m, f in enumerate(first):
                    activation = broadcast(load(activations[0], f + start + i64(k)), lanes)
                    _add_scaled(traits, accumulators, 2 * m + k % 2, value, activation)
    halves = _results(traits, accumulators, 2 * len(rows))
    return [bind(halves[2 * m] + halves[2 * m + 1]) for m in range(len(rows))]


def _float_values(traits: Traits, layout: PackedFormat, weight: Expr, start: Expr) -> Expr:
    if layout.name != "bf16":
        return _scales(traits, weight, start, {"f32": "float32", "f16": "float16"}[layout.name])
    bits = reinterpret(f"uint16x{traits.lanes}", load(weight, start, 2 * traits.lanes))
    word = f"uint32x{traits.lanes}"
    return bind(reinterpret(traits.f32, tirx.shift_left(cast(word, bits), const(16, word))))
