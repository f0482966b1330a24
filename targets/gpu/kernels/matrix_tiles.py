"""Inner products by a matrix unit: rows of packed weights times 64 activation rows, or 8 to 16, by one workgroup.

Each wave of 32 lanes is a slice of `row_groups`: it takes the same blocks of K, adds what each of them gives in the
same order, and the slices' sums meet in the same tree. So the results are those of `row_groups` bit for bit. Knows
nothing of what happens to the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, barrier, bind, f32, i32, load, local, store
from dflashc.targets.gpu.kernels.block_products import add_block
from dflashc.targets.gpu.kernels.codes import LANES, BlockScales, PackedRow, block_parts
from dflashc.targets.gpu.kernels.exact_floats import OFFSET_BITS, float_of, float_of_sum
from dflashc.targets.gpu.kernels.row_groups import GROUPS, ROWS, SLICES, Products, UnitRows, load_sums
from dflashc.targets.gpu.matrix_units import WAVE, MatrixUnit, Quads
from dflashc.targets.packing import BLOCK, PackedFormat

TILE_UNITS, TILE_ROWS = 2, 64
"""What a workgroup takes in prefill: units of 32 weight rows, and activation rows."""
_KEPT_ROWS = 16
"""Activation rows whose products the workgroup's memory has room for, so that whole tiles can be stored."""


def products_room(layout: PackedFormat, rows: int, weights: int, slices: int) -> int:
    """Floats of memory that a slice needs: for products, and before these for the numbers of two blocks."""
    pairs, rows = _at_once(layout, slices, rows)
    return max(_KEPT_ROWS * ROWS, 2 * _floats_of_block(layout, rows, min(weights, pairs)))


def _at_once(layout: PackedFormat, slices: int, rows: int) -> tuple[int, int]:
    """Of how many pairs and activation rows a thread keeps the sums at a time, so that its registers hold all."""
    if slices > SLICES:
        return 1, min(TILE_ROWS // 2, rows)
    return 1 if layout.name == "q2_k" else TILE_UNITS, rows


def _pitch(rows: int) -> int:
    """Rows of which every lane of a wave finds the numbers of as many."""
    return math.ceil(rows / WAVE) * WAVE


def _floats_of_block(layout: PackedFormat, rows: int, pairs: int) -> int:
    """Of `rows` activation rows a scale, and where there are minima the scaled sums; of weight rows all scales."""
    parts, minima = block_parts(layout)
    return _pitch(rows) * (1 + minima) + pairs * ROWS * (parts + minima)


@dataclass(frozen=True)
class _Group:
    """16 weight rows as a lane sees them: those of its own, and where they stand among those of all pairs."""

    rows: list[PackedRow]
    places: list[Expr]


@dataclass(frozen=True)
class _Numbers:
    """Some floats of each of `pitch` rows, found by one lane each, for all lanes of the wave to read."""

    memory: Expr
    first: Expr
    pitch: int
    count: int

    def put(self, row: Expr, values: Sequence[Expr]) -> None:
        assert len(values) == self.count
        for number, value in enumerate(values):
            store(self.memory, self.first + number * self.pitch + row, value)

    def of(self, row: Expr) -> list[Expr]:
        return [bind(load(self.memory, self.first + number * self.pitch + row)) for number in range(self.count)]


def _existing(row: Expr, end: int, rows: int) -> Expr:
    """A row below `end`; the last one where there are only `rows`."""
    return row if end <= rows else tirx.min(row, i32(rows - 1))


@dataclass(frozen=True)
class Tile:
    """What the products of a workgroup are made of.

    Attributes
    ----------
    weights : sequence of UnitRows
        The pairs of row groups.
    activations : sequence of buffers
        Codes, scales, sums.
    first_row : int32
        Of the activation rows.
    rows : int
        Activation rows, `TILE_ROWS` or at most 16; the unit's own tiles need not be full.
    """

    unit: MatrixUnit
    layout: PackedFormat
    weights: Sequence[UnitRows]
    activations: Sequence[Expr]
    first_row: Expr
    rows: int

    def emit(self, products: Products, thread: Expr) -> Iterator[tuple[int, int]]:
        """Yield (pair, activation row) once the products of that pair and of `products.rows` rows from there on can be
        read; every thread must be done with them at the next step.
        """
        lane = bind(tirx.truncmod(thread, i32(WAVE)))
        slice_ = bind(tirx.truncdiv(thread, i32(WAVE)))
        most_pairs, most_rows = _at_once(self.layout, products.slices, self.rows)
        yielded = False
        for first, first_row in product(range(0, len(self.weights), most_pairs), range(0, self.rows, most_rows)):
            if yielded:
                barrier()
            pairs = self.weights[first : first + most_pairs]
            groups = list(self._groups(pairs, lane))
            sums = self._sums(products, pairs, groups, bind(self.first_row + first_row), most_rows, slice_, lane)
            for index, row in product(range(len(pairs)), range(0, most_rows, products.rows)):
                barrier()
                self._store(products, sums, groups, most_rows, index * GROUPS, row, slice_, lane)
                barrier()
                yield first + index, first_row + row
                yielded = True

    def _groups(self, pairs: Sequence[UnitRows], lane: Expr) -> Iterator[_Group]:
        for pair, number in product(range(len(pairs)), range(GROUPS)):
            places = [bind(row + number * LANES) for row in self.unit.weight_rows(lane)]
            yield _Group([pairs[pair](place) for place in places], [bind(place + pair * ROWS) for place in places])

    def _tiles(self, rows: int) -> int:
        """The unit's tiles that hold `rows` activation rows."""
        return math.ceil(rows / self.unit.activation_rows)

    def _sums(self, products: Products, pairs: Sequence[UnitRows], groups: Sequence[_Group], first_row: Expr, rows: int,
              slice_: Expr, lane: Expr) -> Expr:
        """The slice's sums: [group][tile of activation rows][result of the lane]."""
        unit, blocks, slices = self.unit, bind(tirx.truncdiv(groups[0].rows[0].columns, i32(BLOCK))), products.slices
        tiles, results = self._tiles(rows), len(unit.results)
        sums = local(len(groups) * tiles * results, "float32")
        for i in range(len(groups) * tiles * results):
            store(sums, i, f32(0))
        parts, minima = block_parts(self.layout)
        floats = _floats_of_block(self.layout, rows, len(pairs))
        memory = bind(slice_ * (2 * floats))
        places, scaled = unit.places(lane), [pair(lane) for pair in pairs]
        own_row, result_rows = unit.activation_row(lane), unit.result_rows(lane)
        with T.serial(i32(0), bind(tirx.truncdiv(blocks - slice_ + (slices - 1), i32(slices)))) as turn:
            block = bind(slice_ + turn * slices)
            held = [[row.quads(block, places) for row in group.rows] for group in groups]
            first = bind(memory + (turn & i32(1)) * floats)  # two blocks in turns, so that a wave meets once a block
            inputs = _Numbers(products.sums, first, _pitch(rows), 1 + minima)
            scales = _Numbers(products.sums, bind(first + inputs.pitch * inputs.count), len(pairs) * ROWS,
                              parts + minima)
            self._find_inputs(inputs, first_row, rows, blocks, block, lane)
            for pair, found in enumerate([weight_row.scales(block) for weight_row in scaled]):
                scales.put(bind(lane + pair * ROWS), [*found.factors, *found.minima])
            unit.meet()
            own_scales = [[BlockScales(tuple(numbers[:parts]), tuple(numbers[parts:]))
                           for numbers in map(scales.of, group.places)] for group in groups]
            for tile in range(tiles):
                end = (tile + 1) * unit.activation_rows
                read = bind(first_row + _existing(own_row + tile * unit.activation_rows, end, rows))
                quads = unit.activation_quads(self.activations[0], bind(read * blocks + block), lane)
                given = [inputs.of(bind(row + tile * unit.activation_rows)) for row in result_rows]
                for number, words in enumerate(held):
                    dots = self._dots(words, quads, parts)
                    for result, (own, row) in enumerate(unit.results):
                        index = (number * tiles + tile) * results + result
                        input_scale, *input_sums = given[row]
                        store(sums, index, add_block(own_scales[number][own], [float_of_sum(d[result]) for d in dots],
                                                     input_scale, input_sums, load(sums, index)))
        return sums

    def _find_inputs(self, inputs: _Numbers, first_row: Expr, rows: int, blocks: Expr, block: Expr,
                     lane: Expr) -> None:
        """Each activation row's scale, and the sums of its codes times it; those of the last row where there is none,
        which results that nobody reads are made of.
        """
        _, scales, sums = self.activations
        for start in range(0, inputs.pitch, WAVE):
            row = bind(lane + start)
            at = bind((first_row + _existing(row, start + WAVE, rows)) * blocks + block)
            scale = bind(load(scales, at))
            parts = load_sums(sums, at, inputs.count - 1) if inputs.count > 1 else []
            inputs.put(row, [scale, *(bind(float_of(s) * scale) for s in parts)])

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
        tiles, results = self._tiles(kept_rows), len(unit.results)
        rows, first = unit.result_rows(lane), bind(slice_ * ROWS)
        for tile in range(first_row // unit.activation_rows, self._tiles(first_row + products.rows)):
            start = tile * unit.activation_rows - first_row
            for number, (result, (own, row)) in product(range(first_group, first_group + GROUPS),
                                                        enumerate(unit.results)):
                place = groups[number].places[own] & i32(ROWS - 1)
                store(products.sums, (rows[row] + start) * products.threads + first + place,
                      load(sums, (number * tiles + tile) * results + result))
