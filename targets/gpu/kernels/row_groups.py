"""The inner products of matmuls: 32 rows of packed weights times up to 16 activation rows, by one workgroup.

A workgroup takes two row groups of 16 rows; its slices of 32 threads share the blocks of 32 along K in turns, and their
sums meet in shared memory in a tree. The order of additions depends on the format and on the number of slices alone:
never on how many activation rows there are. Knows nothing of what happens to the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Expr,
    KernelBuilder,
    barrier,
    bind,
    cast,
    f32,
    fma,
    i32,
    load,
    load4,
    local,
    reinterpret,
    store,
)
from dflashc.targets.gpu.kernels.codes import LANES, PackedRow, code_offset, group_words
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import BLOCK, PACKED_FORMATS, QUADS, PackedFormat

GROUPS = 2
"""Row groups of a workgroup."""
ROWS = LANES * GROUPS
"""Weight rows of a workgroup, and threads of a slice."""
SLICES = 8
"""Slices where nothing else was chosen; a power of two."""
THREADS = SLICES * ROWS
MOST_ROWS = 16
"""Activation rows that one pass takes; more rows are further workgroups."""


def activation_form(layout: PackedFormat) -> str:
    """The form in which a matmul of this format reads its activations."""
    return "f32" if layout.family == "float" else "q8_32s"


def activation_arguments(format_name: str, prefix: str = "input") -> list[tuple[str, str]]:
    """The arguments of an activation; codes as words of four."""
    if activation_form(PACKED_FORMATS[format_name]) == "f32":
        return [(f"{prefix}_values", "float32")]
    return [(f"{prefix}_codes", "int32"), (f"{prefix}_scale", "float32"), (f"{prefix}_sums", "int32")]


@dataclass(frozen=True)
class Products:
    """Inner products in shared memory, ready to be added up: [activation row][slice][weight row]."""

    sums: Expr
    rows: int
    slices: int

    @staticmethod
    def declare(k: KernelBuilder, rows: int, slices: int = SLICES) -> Products:
        return Products(k.shared(rows * slices * ROWS, "float32"), rows, slices)

    @property
    def threads(self) -> int:
        """Of the workgroup."""
        return self.slices * ROWS

    def total(self, entry: Expr) -> Expr:
        """The product of entry = activation row * 32 + weight row, float32."""
        first = bind(tirx.truncdiv(entry, i32(ROWS)) * self.threads + tirx.truncmod(entry, i32(ROWS)))
        level = [load(self.sums, first + s * ROWS) for s in range(self.slices)]
        while len(level) > 1:
            level = [bind(level[i] + level[i + 1]) for i in range(0, len(level), 2)]
        return level[0]

    def entries(self) -> int:
        return self.rows * ROWS


def emit_products(traits: Traits, layout: PackedFormat, weight: Expr, unit: Expr, thread: Expr, weight_rows: Expr,
                  activations: Sequence[Expr], first_row: Expr, columns: Expr, products: Products) -> None:
    """Multiply weight rows 32 * unit … with `products.rows` activation rows from `first_row` on.

    Ends with a barrier: all threads may read `products`. Rows that do not exist give some product of others.
    """
    place = bind(tirx.truncmod(thread, i32(ROWS)))
    last = tirx.truncdiv(weight_rows + (LANES - 1), i32(LANES)) - 1
    group = bind(tirx.min(unit * GROUPS + tirx.truncdiv(place, i32(LANES)), last))
    emit_products_of(traits, layout, weight, bind(group * LANES + tirx.truncmod(place, i32(LANES))), thread,
                     activations, first_row, columns, products)


def emit_products_of(traits: Traits, layout: PackedFormat, weight: Expr, weight_row: Expr, thread: Expr,
                     activations: Sequence[Expr], first_row: Expr, columns: Expr, products: Products) -> None:
    """`emit_products` with any 32 weight rows: `weight_row` is that of place `thread` mod 32 of the results."""
    group, lane = bind(tirx.truncdiv(weight_row, i32(LANES))), bind(tirx.truncmod(weight_row, i32(LANES)))
    row = PackedRow(traits, layout, weight, bind(group * group_words(layout, columns)), lane, columns)
    accumulators = local(products.rows, "float32")
    for m in range(products.rows):
        store(accumulators, m, f32(0))
    slice_ = bind(tirx.truncdiv(thread, i32(ROWS)))
    blocks = bind(tirx.truncdiv(columns, i32(BLOCK)))
    slices = products.slices
    with T.serial(i32(0), bind(tirx.truncdiv(blocks - slice_ + (slices - 1), i32(slices)))) as turn:
        block = bind(slice_ + turn * slices)
        if layout.family == "float":
            _add_floats(row, block, blocks, activations[0], first_row, accumulators, products.rows)
        else:
            _add_codes(row, block, blocks, activations, first_row, accumulators, products.rows)
    for m in range(products.rows):
        store(products.sums, thread + m * products.threads, load(accumulators, m))
    barrier()


def _add_floats(row: PackedRow, block: Expr, blocks: Expr, values: Expr, first_row: Expr, accumulators: Expr,
                count: int) -> None:
    with T.serial(i32(0), i32(BLOCK // 4)) as quad:
        weights = [row.value(bind(block * BLOCK + quad * 4 + j)) for j in range(4)]
        for m in range(count):
            inputs = load4(values, (first_row + m) * (blocks * (BLOCK // 4)) + block * (BLOCK // 4) + quad)
            for weight, value in zip(weights, inputs, strict=True):
                store(accumulators, m, fma(weight, value, load(accumulators, m)))


def _add_codes(row: PackedRow, block: Expr, blocks: Expr, activations: Sequence[Expr], first_row: Expr,
               accumulators: Expr, count: int) -> None:
    """One block: exact integers first, then one or two multiply-adds in float32."""
    codes, activation_scale, sums = activations
    words = [bind(reinterpret("int32", w)) for w in row.words(block)]
    scales = row.scales(block)
    parts = max(1, len(scales.integers), len(scales.minima))
    offset = code_offset(row.layout)
    for m in range(count):
        at = bind((first_row + m) * blocks + block)
        inputs = [*load4(codes, at * 2), *load4(codes, at * 2 + 1)]
        dots = []
        for part in range(parts):
            dot = i32(0)
            for q in range(part * QUADS // parts, (part + 1) * QUADS // parts):
                dot = bind(row.traits.dot4(words[q], inputs[q], dot))
            dots.append(dot)
        halves = []
        if offset or scales.minimum is not None:
            halves = [bind(load(sums, at * 2)), bind(load(sums, at * 2 + 1))]
        part_sums = halves if parts == 2 else [bind(halves[0] + halves[1])] if halves else []
        if offset:
            dots = [bind(d - s * offset) for d, s in zip(dots, part_sums, strict=True)]
        if scales.integers:
            dots = [bind(d * s) for d, s in zip(dots, scales.integers, strict=True)]
        value = cast("float32", dots[0] + dots[1] if parts == 2 else dots[0])
        input_scale = bind(load(activation_scale, at))
        total = fma(value, bind(scales.scale * input_scale), load(accumulators, m))
        if scales.minimum is not None:
            corrections = [bind(s * i) for s, i in zip(part_sums, scales.minima, strict=True)] if scales.minima \
                else part_sums
            correction = cast("float32", corrections[0] + corrections[1] if parts == 2 else corrections[0])
            sign = f32(1 if not scales.minima else -1)  # 4.1 and 5.1 store what is added, K-quants what is subtracted
            total = fma(correction, bind(scales.minimum * input_scale * sign), bind(total))
        store(accumulators, m, total)
