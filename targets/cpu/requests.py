"""Small things that all lowering rules of the CPU share: row counts, rope tables."""

from __future__ import annotations

from dflashc.runtime.plan import Operand

VERIFY_ROWS = range(1, 17)
"""Rows of programs whose kernels are compiled for exactly that many."""


def kernel_rows(rows: int) -> int | None:
    """The row count a kernel is compiled for; None where it is an argument."""
    return rows if rows in VERIFY_ROWS else None


def rows_scalar(compiled_rows: int | None, rows: int) -> list[int]:
    """The row count as an argument, where the kernel takes one."""
    return [] if compiled_rows is not None else [rows]


def cosine_sine(table: Operand, rows: int, pairs: int) -> tuple[Operand, Operand]:
    """The two halves of a rope table."""
    return table, Operand(table.kind, table.name, table.value + rows * pairs * 4)
