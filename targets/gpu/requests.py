"""Small things that all lowering rules of GPUs share: passes over rows, where buffers begin."""

from __future__ import annotations

from dataclasses import replace

from dflashc.passes.operators import Expr
from dflashc.runtime.errors import BuildError
from dflashc.runtime.plan import Operand, Units
from dflashc.targets.context import ProgramContext
from dflashc.targets.gpu.kernels import look_up as look_up_kernels
from dflashc.targets.gpu.kernels.kv_cache import HEAD_MULTIPLES
from dflashc.targets.gpu.kernels.matrix_tiles import TILE_ROWS, TILE_UNITS
from dflashc.targets.gpu.kernels.row_groups import MOST_ROWS
from dflashc.targets.gpu.kernels.shares import Share
from dflashc.targets.gpu.matrix_units import MatrixUnit, matrix_unit
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import ALIGNMENT, PACKED_FORMATS
from dflashc.targets.requests import request

_PREFILL_UNITS = 2
"""Of 32 weight rows, without a matrix unit: with four, Mesa's compiler for AMD runs out of registers."""


def check_heads(of: str, size: int, kv: str, most: int) -> None:
    """Raise `BuildError` unless heads of `size` elements, `most` at most, can be kept in caches of type `kv`."""
    def fits(name: str) -> bool:
        return size % HEAD_MULTIPLES[name] == 0 and size <= most

    if not fits(kv):
        raise BuildError(f"{of} heads of {size} elements found; K/V type {kv} on GPU targets needs a multiple of "
                         f"{HEAD_MULTIPLES[kv]} up to {most}" + (": use f16" if fits("f16") else ""))


def rows_of_pass(rows: int) -> int:
    """Activation rows that one workgroup of a matmul takes, in a program of `rows` rows."""
    return rows if rows <= MOST_ROWS else MOST_ROWS


def matrix_unit_for(traits: Traits, format_name: str) -> MatrixUnit | None:
    """The matrix unit that multiplies weights of this format, if there is one."""
    return matrix_unit(traits) if PACKED_FORMATS[format_name].family != "float" else None


def share_of_matmul(traits: Traits, format_name: str, rows: int, matrices: int = 1, fewest_rows: int = 0) -> Share:
    """What a workgroup of a matmul takes in a program of `rows` rows; `matrices` are two in a gated unit.

    Steps leave as many workgroups as there are, for memory to be busy; a matrix unit takes those of `fewest_rows` or
    more, by default what the unit says. In prefill arithmetic is the limit, so that activations are loaded for more
    weight rows at a time, and a matrix unit takes all.
    """
    unit = matrix_unit_for(traits, format_name)
    if rows <= MOST_ROWS:
        return Share(rows, 1, "matrix" if unit and rows >= (fewest_rows or unit.fewest_rows) else "dots")
    if unit and rows % TILE_ROWS == 0:
        return Share(TILE_ROWS, TILE_UNITS // matrices, "matrix")
    return Share(MOST_ROWS, _PREFILL_UNITS // matrices)


def split_offset(operand: Operand) -> tuple[Operand, int]:
    """An operand of 4-byte elements as one that starts at a whole `ALIGNMENT`, and the elements left: buffers are bound
    at such places only.
    """
    offset = int(operand.value)
    return replace(operand, value=offset - offset % ALIGNMENT), offset % ALIGNMENT // 4


def look_up(c: ProgramContext, indices: Operand, table: Expr, output: Operand, count: int) -> None:
    """output[i] = table[indices[i]] for `count` int32 indices."""
    start, first = split_offset(output)
    c.launch(request(look_up_kernels.look_up), "reduced vocabulary", Units(-(-count // look_up_kernels.THREADS)),
             [indices, c.operand(table), start, count, first])
