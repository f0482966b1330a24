"""Small things that all lowering rules of GPUs share: passes over rows, where buffers begin."""

from __future__ import annotations

from dataclasses import replace

from dflashc.passes.operators import Expr
from dflashc.runtime.errors import BuildError
from dflashc.runtime.plan import Operand, Units
from dflashc.targets.context import ProgramContext
from dflashc.targets.gpu.kernels import look_up as look_up_kernels
from dflashc.targets.gpu.kernels.kv_cache import HEAD_MULTIPLES
from dflashc.targets.gpu.kernels.row_groups import MOST_ROWS
from dflashc.targets.packing import ALIGNMENT
from dflashc.targets.requests import request


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
