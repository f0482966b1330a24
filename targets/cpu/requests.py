"""Small things that all lowering rules of the CPU share: kernel symbols, row counts, rope tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflashc.runtime.plan import Operand
from dflashc.targets.requests import KernelRequest

VERIFY_ROWS = range(1, 17)
"""Rows of programs whose kernels are compiled for exactly that many."""


def request(builder: Callable[..., Any], *arguments: Any) -> KernelRequest:
    """A kernel by its builder; the symbol is spelt from the arguments."""
    words = [builder.__name__, *(_word(a) for a in arguments)]
    return KernelRequest("_".join(words), builder, arguments)


def _word(argument: Any) -> str:
    if argument is None:
        return "rows"
    if isinstance(argument, bool):
        return "norm" if argument else "plain"
    if isinstance(argument, tuple):
        return "_".join(map(str, argument)) or "none"
    return str(argument)


def kernel_rows(rows: int) -> int | None:
    """The row count a kernel is compiled for; None where it is an argument."""
    return rows if rows in VERIFY_ROWS else None


def rows_scalar(compiled_rows: int | None, rows: int) -> list[int]:
    """The row count as an argument, where the kernel takes one."""
    return [] if compiled_rows is not None else [rows]


def cosine_sine(table: Operand, rows: int, pairs: int) -> tuple[Operand, Operand]:
    """The two halves of a rope table."""
    return table, Operand(table.kind, table.name, table.value + rows * pairs * 4)
