"""Embedding look-up out of packed weights, since embedding and head are often one tensor.

Dequantises one row of a row group; the results equal ggml's formulas in float32, rounding for rounding.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, cast, const, i64, load, reinterpret, store
from dflashc.targets.cpu.kernels.codes import block_quads
from dflashc.targets.cpu.kernels.row_groups import group_stride
from dflashc.targets.cpu.kernels.vector_math import half_to_float
from dflashc.targets.cpu.traits import Traits, broadcast
from dflashc.targets.packing import BLOCK, PACKED_FORMATS, QUAD, QUADS, PackedFormat


def embed(traits: Traits, format_name: str) -> Kernel:
    """output[m] = scale * w[ids[m]]. Unit = one row m.

    Arguments: ids int32 (M), each below the weight's rows; weight uint8, output float32 (M, K); then the scalars
    columns (K), scale (f32; 1 leaves the values exact).
    """
    layout = PACKED_FORMATS[format_name]
    k = KernelBuilder(f"embed_{format_name}", traits)
    with k.build():
        ids, weight, output = k.buffer("ids", "int32"), k.buffer("weight", "uint8"), k.buffer("output", "float32")
        columns, scale = k.scalar("columns"), k.scalar("scale", "f32")
        with k.units() as m:
            row = bind(cast("int64", load(ids, m)))
            emit_row(traits, layout, weight, row, columns, output, m * columns, scale)
    return k.kernel


def emit_row(traits: Traits, layout: PackedFormat, weight: Expr, row: Expr, columns: Expr, output: Expr, first: Expr,
             scale: Expr) -> None:
    """output[first:][:columns] = scale * weight[row], float32."""
    quant_bytes, stride = group_stride(traits, layout, columns)
    group = bind(tirx.floordiv(row, i64(traits.lanes)))
    lane = bind(row - group * i64(traits.lanes))
    start = bind(group * stride)
    with T.serial(i64(0), tirx.floordiv(columns, i64(BLOCK))) as b:
        target = bind(first + b * i64(BLOCK))
        if layout.family == "float":
            _float_block(traits, layout, weight, start, b, lane, output, target, scale)
        else:
            _code_block(traits, layout, weight, start, quant_bytes, b, lane, output, target, scale)


def _float_block(traits: Traits, layout: PackedFormat, weight: Expr, start: Expr, block: Expr, lane: Expr,
                 output: Expr, target: Expr, scale: Expr) -> None:
    size = layout.bits // 8
    with T.serial(i64(0), i64(BLOCK)) as k:
        offset = bind(start + ((block * i64(BLOCK) + k) * i64(traits.lanes) + lane) * i64(size))
        store(output, target + k, _value(traits, layout.name, weight, offset) * scale)


def _value(traits: Traits, dtype: str, weight: Expr, offset: Expr) -> Expr:
    """A float32, float16 or bfloat16 at a byte offset, as float32."""
    if dtype in ("f32", "float32"):
        return bind(reinterpret("float32", load(weight, offset, 4)))
    bits = bind(reinterpret("uint16", load(weight, offset, 2)))
    if dtype == "bf16":
        return bind(reinterpret("float32", tirx.shift_left(cast("uint32", bits), const(16, "uint32"))))
    return half_to_float(traits, bits)


def _code_block(traits: Traits, layout: PackedFormat, weight: Expr, start: Expr, quant_bytes: Expr, block: Expr,
                lane: Expr, output: Expr, target: Expr, scale: Expr) -> None:
    block_bytes = BLOCK * layout.bits // 8 * traits.lanes
    scales, minima = _block_scales(traits, layout, weight, bind(start + quant_bytes), block, lane)
    quads = block_quads(traits, layout, weight, bind(start + block * i64(block_bytes) + lane * i64(QUAD)), rows=1)
    for index, quad in enumerate(quads):
        part = index * len(scales) // QUADS
        codes = cast("int32x4", quad) - const(layout.offset, "int32x4")
        value = bind(cast("float32x4", codes) * broadcast(scales[part], QUAD))
        if minima:
            value = bind(value + broadcast(minima[part], QUAD))
        store(output, target + i64(index * QUAD), value * broadcast(scale, QUAD), QUAD)


def _block_scales(traits: Traits, layout: PackedFormat, weight: Expr, headers: Expr, block: Expr,
                  lane: Expr) -> tuple[list[Expr], list[Expr]]:
    """Float scales of a block or of its halves, and what is added after them (none without minima)."""
    lanes = traits.lanes
    group_blocks = layout.group // BLOCK
    group = bind(tirx.floordiv(block, i64(group_blocks)))
    header = bind(headers + group * i64(layout.header_bytes * lanes))
    pairs = 2 * group_blocks * lanes if layout.family == "super" else 0
    size = 4 if layout.scale_dtype == "float32" else 2

    def field(index: int) -> Expr:
        return _value(traits, layout.scale_dtype, weight, header + i64(pairs + index * size * lanes) + lane * i64(size))

    scale = field(0)
    minimum = field(1) if layout.minimum else None
    if layout.family == "block":
        return [scale], [] if minimum is None else [minimum]
    pair = bind(header + (block - group * i64(group_blocks)) * i64(2 * lanes) + lane * i64(2))
    both = [bind(load(weight, pair + i64(i))) for i in range(2)]
    if minimum is None:
        return [bind(scale * cast("float32", reinterpret("int8", byte))) for byte in both], []
    if layout.name == "q2_k":
        scale_codes = [byte & const(15, "uint8") for byte in both]
        minimum_codes = [tirx.shift_right(byte, const(4, "uint8")) for byte in both]
    else:
        scale_codes, minimum_codes = both[:1], both[1:]
    return ([bind(scale * cast("float32", code)) for code in scale_codes],
            [bind(const(0.0, "float32") - minimum * cast("float32", code)) for code in minimum_codes])
