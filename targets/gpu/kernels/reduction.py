"""Sums over the threads of a workgroup, in trees of fixed shape: no subgroup operations, the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, barrier, bind, load, store

THREADS = 256
_SIDE = 16  # 256 = 16 * 16: two barriers instead of eight

SCRATCH = THREADS + _SIDE
"""Floats of shared memory that `workgroup_sum` needs."""


def tree(values: Sequence[Expr], combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Combine a list pairwise."""
    level = list(values)
    while len(level) > 1:
        level = [bind(combine(level[i], level[i + 1])) for i in range(0, len(level) - 1, 2)] + level[len(level) & ~1 :]
    return level[0]


def add(a: Expr, b: Expr) -> Expr:
    return a + b


def workgroup_sum(scratch: Expr, thread: Expr, value: Expr) -> Expr:
    """The sum of `value` over all 256 threads, in each of them. All must call it; it may follow itself."""
    store(scratch, thread, value)
    barrier()
    with T.If(thread < _SIDE), T.Then():
        store(scratch, thread + THREADS, tree([bind(load(scratch, thread + i * _SIDE)) for i in range(_SIDE)], add))
    barrier()
    return tree([bind(load(scratch, THREADS + i)) for i in range(_SIDE)], add)
