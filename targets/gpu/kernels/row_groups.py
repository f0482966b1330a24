"""The inner products of matmuls: 32 rows of packed weights times up to 16 activation rows, by one workgroup.

A workgroup takes two row groups of 16 rows at a time; its slices of 32 threads share the blocks of 32 along K in turns,
and their sums meet in shared memory in a tree. The order of additions depends on the format and on the number of slices
alone: never on how many activation rows there are. Knows nothing of what happens to the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Expr,
    KernelBuilder,
    barrier,
    bind,
    f32,
    fma,
    i32,
    load,
    load4,
    local,
    store,
)
from dflashc.targets.gpu.kernels.block_products import add_block
from dflashc.targets.gpu.kernels.codes import LANES, PackedRow, block_parts, group_words
from dflashc.targets.gpu.kernels.exact_floats import OFFSET_BITS, float_of, float_of_sum
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
    def declare(k: KernelBuilder, rows: int, slices: int = SLICES, room: int = 0) -> Products:
        """Of `rows` activation rows, in memory of at least `room` floats a slice."""
        return Products(k.shared(max(rows * ROWS, room) * slices, "float32"), rows, slices)

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


UnitRows = Callable[[Expr], PackedRow]
"""Any 32 rows of a matrix, by their places 0 to 31."""


def rows_of_unit(traits: Traits, layout: PackedFormat, weight: Expr, unit: Expr, weight_rows: Expr,
                 columns: Expr) -> UnitRows:
    """The two row groups of the unit of this number; the last group where there is none."""
    last = bind(tirx.truncdiv(weight_rows + (LANES - 1), i32(LANES)) - 1)

    def row(place: Expr) -> PackedRow:
        group = bind(tirx.min(unit * GROUPS + tirx.truncdiv(place, i32(LANES)), last))
        start = bind(group * group_words(layout, columns))
        return PackedRow(traits, layout, weight, start, bind(tirx.truncmod(place, i32(LANES))), columns)

    return row


def packed_row(traits: Traits, layout: PackedFormat, weight: Expr, weight_row: Expr, columns: Expr) -> PackedRow:
    """A row of a packed matrix by its number."""
    group, lane = bind(tirx.truncdiv(weight_row, i32(LANES))), bind(tirx.truncmod(weight_row, i32(LANES)))
    return PackedRow(traits, layout, weight, bind(group * group_words(layout, columns)), lane, columns)


def row_of_thread(rows: UnitRows, thread: Expr) -> PackedRow:
    """The row whose products a thread adds up."""
    return rows(bind(tirx.truncmod(thread, i32(ROWS))))


def emit_sums(rows: Sequence[PackedRow], thread: Expr, activations: Sequence[Expr], first_row: Expr,
              products: Products) -> Expr:
    """What the thread's slice gives for each of its rows times each activation row: float32 [row][activation row].

    With more rows an activation is loaded less often.
    """
    layout, columns, slices = rows[0].layout, rows[0].columns, products.slices
    sums = local(len(rows) * products.rows, "float32")
    for i in range(len(rows) * products.rows):
        store(sums, i, f32(0))
    slice_ = bind(tirx.truncdiv(thread, i32(ROWS)))
    blocks = bind(tirx.truncdiv(columns, i32(BLOCK)))
    with T.serial(i32(0), bind(tirx.truncdiv(blocks - slice_ + (slices - 1), i32(slices)))) as turn:
        block = bind(slice_ + turn * slices)
        if layout.family == "float":
            _add_floats(rows, block, blocks, activations[0], first_row, sums, products.rows)
        else:
            _add_codes(rows, block, blocks, activations, first_row, sums, products.rows)
    return sums


def emit_store(products: Products, thread: Expr, sums: Expr, row: int) -> None:
    """Row `row` of `emit_sums` as products, for all threads to read."""
    for m in range(products.rows):
        store(products.sums, thread + m * products.threads, load(sums, row * products.rows + m))
    barrier()


def _add_floats(rows: Sequence[PackedRow], block: Expr, blocks: Expr, values: Expr, first_row: Expr, sums: Expr,
                count: int) -> None:
    # unrolled by nvcc, some numbers of rows take more registers than there are
    with T.serial(i32(0), i32(BLOCK // 4), annotations={"disable_unroll": True}) as quad:
        weights = [[row.value(bind(block * BLOCK + quad * 4 + j)) for j in range(4)] for row in rows]
        for m in range(count):
            inputs = load4(values, (first_row + m) * (blocks * (BLOCK // 4)) + block * (BLOCK // 4) + quad)
            for number, own in enumerate(weights):
                at = number * count + m
                for weight, value in zip(own, inputs, strict=True):
                    store(sums, at, fma(weight, value, load(sums, at)))


def _add_codes(rows: Sequence[PackedRow], block: Expr, blocks: Expr, activations: Sequence[Expr], first_row: Expr,
               sums: Expr, count: int) -> None:
    codes, activation_scale, activation_sums = activations
    weights = [(row.quads(block), row.scales(block)) for row in rows]
    parts, minima = block_parts(rows[0].layout)
    for m in range(count):
        at = bind((first_row + m) * blocks + block)
        inputs = [*load4(codes, at * 2), *load4(codes, at * 2 + 1)]
        input_scale = bind(load(activation_scale, at))
        input_sums = [bind(float_of(s) * input_scale) for s in load_sums(activation_sums, at, parts)] if minima else []
        for number, ((lower, upper), scales) in enumerate(weights):
            quads, dots = lower + upper, []
            for part in range(parts):
                dot = i32(OFFSET_BITS)
                for q in range(part * QUADS // parts, (part + 1) * QUADS // parts):
                    dot = bind(rows[0].traits.dot4(quads[q], inputs[q], dot))
                dots.append(float_of_sum(dot))
            index = number * count + m
            store(sums, index, add_block(scales, dots, input_scale, input_sums, load(sums, index)))


def load_sums(sums: Expr, block: Expr, parts: int) -> list[Expr]:
    """The sums of a block's activation codes, int32, for each of its parts."""
    halves = [bind(load(sums, block * 2 + half)) for half in range(2)]
    return halves if parts == 2 else [bind(halves[0] + halves[1])]
