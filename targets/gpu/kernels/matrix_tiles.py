"""Inner products by a matrix unit: 64 rows of packed weights times many activation rows, by one workgroup.

Each wave of 32 lanes is a slice of `row_groups`: it takes the same blocks of K, adds what each of them gives in the
same order, and the slices' sums meet in the same tree. So the results are those of `row_groups` bit for bit. Knows
nothing of what happens to the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, barrier, bind, f32, i32, load, local, store
from dflashc.targets.gpu.kernels.block_products import add_block
from dflashc.targets.gpu.kernels.codes import LANES, BlockScales, PackedRow, group_words
from dflashc.targets.gpu.kernels.exact_floats import OFFSET_BITS, float_of, float_of_sum
from dflashc.targets.gpu.kernels.row_groups import GROUPS, ROWS, SLICES, Products, load_sums
from dflashc.targets.gpu.matrix_units import WAVE, MatrixUnit, Quads
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import BLOCK, PackedFormat

TILE_UNITS, TILE_ROWS = 2, 64
"""What a workgroup takes: units of 32 weight rows, and activation rows."""
_VALUES = 3
"""Floats that go with a block of an activation row: its scale, and the scaled sums of one or two parts."""


def _at_once(layout: PackedFormat, slices: int) -> tuple[int, int]:
    """Of how many pairs and activation rows a thread keeps the sums at a time, so that its registers hold all."""
    if slices > SLICES:
        return 1, TILE_ROWS // 2
    return 1 if layout.name == "q2_k" else TILE_UNITS, TILE_ROWS


@dataclass(frozen=True)
class _Group:
    """16 weight rows as a lane sees them: those of its own, and where they stand among the 32 of a pair."""

    rows: list[PackedRow]
    places: list[Expr]

    def block(self, block: Expr, places: Sequence[Expr]) -> tuple[list[Quads], list[BlockScales]]:
        return [row.quads(block, places) for row in self.rows], [row.scales(block) for row in self.rows]


@dataclass
class _Inputs:
    """Scales and sums of a block of `rows` activation rows, of which every lane needs some: read once by a wave, and
    kept in memory of the workgroup that is its own while the products are not there yet.

    There is room for two blocks in turns, so that a wave meets once a block.
    """

    memory: Expr
    first: Expr
    rows: int
    lane: Expr
    current: Expr = None
    parts: int = 0

    @staticmethod
    def within(products: Products, slice_: Expr, lane: Expr, rows: int) -> _Inputs:
        share = products.rows * ROWS
        assert 2 * _VALUES * rows <= share
        return _Inputs(products.sums, bind(slice_ * share), rows, lane)

    def read(self, activations: Sequence[Expr], first_row: Expr, blocks: Expr, block: Expr, turn: Expr,
             parts: int) -> None:
        """Take over a block's scales, and its sums in `parts` parts times them; then the wave has to meet."""
        _, scales, sums = activations
        self.parts, self.current = parts, bind(self.first + (turn & i32(1)) * (_VALUES * self.rows))
        for start in range(0, self.rows, WAVE):
            row = bind(self.lane + start)
            at = bind((first_row + row) * blocks + block)
            scale = bind(load(scales, at))
            values = [bind(float_of(s) * scale) for s in load_sums(sums, at, parts)] if parts else []
            for number, value in enumerate([scale, *values]):
                store(self.memory, self.current + number * self.rows + row, value)

    def of(self, row: Expr) -> list[Expr]:
        """The scale of a row, and its scaled sums."""
        return [bind(load(self.memory, self.current + number * self.rows + row)) for number in range(1 + self.parts)]


@dataclass(frozen=True)
class Tile:
    """What the products of a workgroup are made of.

    Attributes
    ----------
    weights : sequence of (buffer, int32)
        Per pair of row groups the packed weight and the unit of 32 of its rows.
    activations : sequence of buffers
        Codes, scales, sums.
    first_row : int32
        Of `TILE_ROWS` activation rows.
    """

    traits: Traits
    unit: MatrixUnit
    layout: PackedFormat
    weights: Sequence[tuple[Expr, Expr]]
    weight_rows: Expr
    activations: Sequence[Expr]
    first_row: Expr
    columns: Expr

    def emit(self, products: Products, thread: Expr) -> Iterator[tuple[int, int]]:
        """Yield (pair, activation row) once the products of that pair and of `products.rows` rows from there on can be
        read; every thread must be done with them at the next step.
        """
        most_pairs, most_rows = _at_once(self.layout, products.slices)
        lane = bind(tirx.truncmod(thread, i32(WAVE)))
        slice_ = bind(tirx.truncdiv(thread, i32(WAVE)))
        yielded = False
        for first, first_row in product(range(0, len(self.weights), most_pairs), range(0, TILE_ROWS, most_rows)):
            if yielded:
                barrier()
            pairs = self.weights[first : first + most_pairs]
            groups = [group for weight, unit in pairs for group in self._groups(weight, unit, lane)]
            inputs = _Inputs.within(products, slice_, lane, most_rows)
            sums = self._sums(products, groups, inputs, bind(self.first_row + first_row), slice_, lane)
            for index, row in product(range(len(pairs)), range(0, most_rows, products.rows)):
                barrier()
                self._store(products, sums, groups, most_rows, index * GROUPS, row, slice_, lane)
                barrier()
                yield first + index, first_row + row
                yielded = True

    def _groups(self, weight: Expr, unit: Expr, lane: Expr) -> Iterator[_Group]:
        last = tirx.truncdiv(self.weight_rows + (LANES - 1), i32(LANES)) - 1
        for number in range(GROUPS):
            group = bind(tirx.min(unit * GROUPS + number, last))
            start = bind(group * group_words(self.layout, self.columns))
            own = self.unit.weight_rows(lane)
            yield _Group([PackedRow(self.traits, self.layout, weight, start, row, self.columns) for row in own],
                         [bind(row + number * LANES) for row in own])

    def _sums(self, products: Products, groups: Sequence[_Group], inputs: _Inputs, first_row: Expr, slice_: Expr,
              lane: Expr) -> Expr:
        """The slice's sums: [group][tile of activation rows][result of the lane]."""
        unit, blocks = self.unit, bind(tirx.truncdiv(self.columns, i32(BLOCK)))
        tiles, results = inputs.rows // unit.activation_rows, len(unit.results)
        sums = local(len(groups) * tiles * results, "float32")
        for i in range(len(groups) * tiles * results):
            store(sums, i, f32(0))
        places, slices = unit.places(lane), products.slices
        own_row, result_rows = bind(first_row + unit.activation_row(lane)), unit.result_rows(lane)
        with T.serial(i32(0), bind(tirx.truncdiv(blocks - slice_ + (slices - 1), i32(slices)))) as turn:
            block = bind(slice_ + turn * slices)
            held = [group.block(block, places) for group in groups]
            scales = held[0][1][0]
            parts = len(scales.factors)
            inputs.read(self.activations, first_row, blocks, block, turn, len(scales.minima))
            unit.meet()
            for tile in range(tiles):
                row = bind(own_row + tile * unit.activation_rows)
                quads = unit.activation_quads(self.activations[0], bind(row * blocks + block), lane)
                given = [inputs.of(bind(row + tile * unit.activation_rows)) for row in result_rows]
                for number, (words, own_scales) in enumerate(held):
                    dots = self._dots(words, quads, parts)
                    for result, (own, row) in enumerate(unit.results):
                        index = (number * tiles + tile) * results + result
                        input_scale, *input_sums = given[row]
                        store(sums, index, add_block(own_scales[own], [float_of_sum(dot[result]) for dot in dots],
                                                     input_scale, input_sums, load(sums, index)))
        return sums

    def _dots(self, words: Sequence[Quads], quads: Quads, parts: int) -> list[list[Expr]]:
        """The lane's results of each part."""
        if parts == 1:
            return [self.unit.multiply(words, quads, OFFSET_BITS)]
        return [self.unit.multiply([row[half : half + 1] for row in words], quads[half : half + 1], OFFSET_BITS)
                for half in range(2)]

    def _store(self, products: Products, sums: Expr, groups: Sequence[_Group], kept_rows: int, first_group: int,
               first_row: int, slice_: Expr, lane: Expr) -> None:
        """The sums of two groups and `products.rows` of the kept activation rows into shared memory."""
        unit = self.unit
        tiles, results = kept_rows // unit.activation_rows, len(unit.results)
        rows, first = unit.result_rows(lane), bind(slice_ * ROWS)
        for number in range(first_group, first_group + GROUPS):
            for tile in range(first_row // unit.activation_rows, (first_row + products.rows) // unit.activation_rows):
                for result, (own, row) in enumerate(unit.results):
                    activation_row = rows[row] + (tile * unit.activation_rows - first_row)
                    store(products.sums, activation_row * products.threads + first + groups[number].places[own],
                          load(sums, (number * tiles + tile) * results + result))
