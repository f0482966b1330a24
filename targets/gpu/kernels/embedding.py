"""Embedding look-up out of packed weights, since embedding and head are often one tensor."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, Kernel, KernelBuilder, bind, cast, fma, i32, load, store
from dflashc.targets.gpu.kernels.codes import LANES, PackedRow, code_of, group_words
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import BLOCK, PACKED_FORMATS, QUAD

THREADS = 64


def embed_groups(columns: int) -> int:
    """Workgroups for a row."""
    return math.ceil(columns / (BLOCK * THREADS))


def embed(traits: Traits, format_name: str) -> Kernel:
    """output[m] = scale * w[ids[m]]. Workgroup = up to 64 blocks of 32 columns of a row m, a block per thread.

    Arguments: ids int32 (M), each below the weight's rows; weight, output float32 (M, K); then the scalars columns (K),
    scale (f32; 1 leaves the values exact but for one rounding where a format adds a minimum).
    """
    layout = PACKED_FORMATS[format_name]
    k = KernelBuilder(f"embed_{format_name}", traits)
    arguments = [("ids", "int32"), ("weight", "uint32"), ("output", "float32"), ("columns", "i32"), ("scale", "f32")]
    with k.build(arguments) as (ids, weight, output, columns, scale), k.workgroups(THREADS) as (group, thread):
        blocks = bind(tirx.truncdiv(columns, i32(BLOCK)))
        per_row = bind(tirx.truncdiv(blocks + (THREADS - 1), i32(THREADS)))
        m = bind(tirx.truncdiv(group, per_row))
        block = bind(tirx.truncmod(group, per_row) * THREADS + thread)
        with T.If(block < blocks), T.Then():
            token = bind(load(ids, m))
            start = bind(tirx.truncdiv(token, i32(LANES)) * group_words(layout, columns))
            row = PackedRow(traits, layout, weight, start, bind(tirx.truncmod(token, i32(LANES))), columns)
            target = bind(m * columns + block * BLOCK)
            for element, value in enumerate(block_values(row, block)):
                store(output, target + element, value * scale)
    return k.kernel


def block_values(row: PackedRow, block: Expr) -> list[Expr]:
    """The 32 weights of a block, float32."""
    layout = row.layout
    if layout.family == "float":
        return [row.value(bind(block * BLOCK + element)) for element in range(BLOCK)]
    (lower, upper), scales = row.quads(block), row.scales(block)
    quads = lower + upper
    values = []
    for element in range(BLOCK):
        code = bind(cast("float32", code_of(quads[element // QUAD], element % QUAD)))
        factor, *minimum = (of[element * len(of) // BLOCK] for of in (scales.factors, scales.minima) if of)
        values.append(bind(fma(code, factor, *minimum) if minimum else code * factor))
    return values
