"""Matrix units for bytes: 16 weight rows times 8 or 16 activation rows times 32 columns, by 32 lanes together.

A lane hands in some quads (words of four signed bytes) of some rows and gets some of the results; which, each unit
says. Sums are exact in int32, so a matrix unit gives what `Traits.dot4` gives. Both operands hold the same quads in the
same registers, so the order of columns among them does not matter. Knows nothing of block formats.

Sources: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "m16n8k32 with .u8/.s8"; AMD, "RDNA 3 Instruction Set
Architecture" 7.9 and "RDNA 4 Instruction Set Architecture" 7.12, Wave Matrix Multiply Accumulate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, bind, i32, load, load4, local
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import HALF

WAVE = 32
"""Lanes that run in step, on every target with a matrix unit."""

FEWEST_ROWS = 8
"""Activation rows from which on matrix units may be used."""

Quads = Sequence[Sequence[Expr]]
"""Of one row, for each half of a block (or one of them): the quads that a lane holds, int32."""


class MatrixUnit(ABC):
    """A GPU family's matrix unit, as one lane sees it.

    Attributes
    ----------
    activation_rows : int
        Activation rows of a tile.
    fewest_rows : int
        Activation rows from which on a tile takes fewer cycles than dot products of four bytes, by counted
        instructions.
    results : tuple of (int, int)
        What the lane gets: an index into `weight_rows`, and one into `result_rows`.
    """

    activation_rows: int
    fewest_rows: int
    results: tuple[tuple[int, int], ...]

    @abstractmethod
    def weight_rows(self, lane: Expr) -> list[Expr]:
        """Weight rows of the tile that the lane holds quads of, and gets results for."""

    @abstractmethod
    def places(self, lane: Expr) -> list[Expr]:
        """Which quads of each half it holds of them, 0 to 3."""

    @abstractmethod
    def result_rows(self, lane: Expr) -> list[Expr]:
        """Activation rows of the tile that it gets results for."""

    @abstractmethod
    def activation_row(self, lane: Expr) -> Expr:
        """The activation row of the tile that it holds quads of."""

    @abstractmethod
    def activation_quads(self, codes: Expr, block: Expr, lane: Expr) -> Quads:
        """Those quads, read from the block of index `block`."""

    @abstractmethod
    def multiply(self, weights: Sequence[Quads], activations: Quads, start: int) -> list[Expr]:
        """`start` plus the products over a half of the block or both, int32, for each of `results`.

        `weights` holds the quads of each of `weight_rows`.
        """

    @abstractmethod
    def meet(self) -> None:
        """The lanes of the wave see what the others stored in shared memory before."""


class TensorCores(MatrixUnit):
    """NVIDIA's from sm_80 on: m16n8k32 and m16n8k16. Lane = 4 * group + q holds quads q of each half."""

    activation_rows = fewest_rows = FEWEST_ROWS
    results = ((0, 0), (0, 1), (1, 0), (1, 1))

    def weight_rows(self, lane: Expr) -> list[Expr]:
        group = tirx.shift_right(lane, i32(2))
        return [bind(group), bind(group + 8)]

    def places(self, lane: Expr) -> list[Expr]:
        return [bind(lane & i32(3))]

    def result_rows(self, lane: Expr) -> list[Expr]:
        first = (lane & i32(3)) * 2
        return [bind(first), bind(first + 1)]

    def activation_row(self, lane: Expr) -> Expr:
        return bind(tirx.shift_right(lane, i32(2)))

    def activation_quads(self, codes: Expr, block: Expr, lane: Expr) -> Quads:
        first = bind(block * (2 * HALF) + (lane & i32(3)))
        return [[bind(load(codes, first))], [bind(load(codes, first + HALF))]]

    def multiply(self, weights: Sequence[Quads], activations: Quads, start: int) -> list[Expr]:
        halves = len(activations)
        registers = [weights[row][half][0] for half in range(halves) for row in range(2)]
        result = local(4, "int32")
        T.evaluate(tirx.call_extern("void", f"multiply_m16n8k{16 * halves}", tirx.address_of(load(result, 0)),
                                    *registers, *(quads[0] for quads in activations), i32(start)))
        return [bind(load(result, i)) for i in range(4)]

    def meet(self) -> None:
        T.evaluate(tirx.call_extern("void", "__syncwarp"))


class Wmma(MatrixUnit):
    """AMD's v_wmma_i32_16x16x16_iu8, a half of a block each; weights are its second operand, B.

    Lane l has row l mod 16 of both operands. RDNA 3: all 16 bytes of it, results 2i + l / 16. RDNA 4 (`split`): the 8
    bytes from 8 * (l / 16) on, results i + 8 * (l / 16).
    """

    activation_rows = 16
    results = tuple((0, i) for i in range(8))

    def __init__(self, split: bool) -> None:
        self.split = split
        # RDNA 3 multiplies bytes no faster by WMMA than by dot products, and always 16 rows; RDNA 4 is faster by WMMA
        # (AMD GPUOpen, "Using the Matrix Cores of AMD RDNA 4 architecture GPUs")
        self.fewest_rows = FEWEST_ROWS if split else 12

    def weight_rows(self, lane: Expr) -> list[Expr]:
        return [bind(lane & i32(15))]

    def places(self, lane: Expr) -> list[Expr]:
        first = tirx.shift_right(lane, i32(4)) * 2
        return [bind(first), bind(first + 1)] if self.split else [i32(place) for place in range(HALF)]

    def result_rows(self, lane: Expr) -> list[Expr]:
        upper = bind(tirx.shift_right(lane, i32(4)))
        return [bind(upper * 8 + i if self.split else upper + 2 * i) for i in range(8)]

    def activation_row(self, lane: Expr) -> Expr:
        return bind(lane & i32(15))

    def activation_quads(self, codes: Expr, block: Expr, lane: Expr) -> Quads:
        if not self.split:
            return [load4(codes, block * 2 + half) for half in range(2)]
        first = bind(block * (2 * HALF) + tirx.shift_right(lane, i32(4)) * 2)
        return [[bind(load(codes, first + half * HALF + i)) for i in range(2)] for half in range(2)]

    def multiply(self, weights: Sequence[Quads], activations: Quads, start: int) -> list[Expr]:
        yes, no = tirx.const(1, "bool"), tirx.const(0, "bool")
        result = tirx.Broadcast(i32(start), 8)
        for own, others in zip(weights[0], activations, strict=True):
            result = bind(tirx.call_llvm_pure_intrin("int32x8", "llvm.amdgcn.wmma.i32.16x16x16.iu8", yes,
                                                     _vector(others), yes, _vector(own), result, no))
        return [tirx.Shuffle([result], [i32(i)]) for i in range(8)]

    def meet(self) -> None:
        T.evaluate(tirx.call_intrin("void", "tirx.tvm_storage_sync", "warp"))


def _vector(quads: Sequence[Expr]) -> Expr:
    return tirx.Shuffle(list(quads), [i32(i) for i in range(len(quads))])


def matrix_unit(traits: Traits) -> MatrixUnit | None:
    """The family's matrix unit, if kernels can use one: on Vulkan none, see `docs/roofline.md`."""
    if traits.code == "cuda":
        return TensorCores() if int(traits.arch.removeprefix("sm_")) >= 80 else None
    if traits.code == "rocm":
        return Wmma(split=traits.arch.startswith("gfx12"))
    return None
