"""The second half of greedy heads: the best of the partial results that the matmul leaves. Ties: the lowest index."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Expr,
    Kernel,
    KernelBuilder,
    barrier,
    bind,
    f32,
    i32,
    load,
    local,
    select,
    store,
)
from dflashc.targets.gpu.traits import Traits

_THREADS = 256
_INT32_MAX = (1 << 31) - 1


def argmax_reduce(traits: Traits) -> Kernel:
    """The best of the partial results of `matmul_argmax`, the lowest index among equals. Workgroup = a row.

    Arguments: value float32 (count, M), without NaN; index int32 (count, M), ids int32; then the scalars count, rows
    (M), first: where in `ids` the rows' ids begin.
    """
    k = KernelBuilder("argmax_reduce", traits)
    arguments = [("value", "float32"), ("index", "int32"), ("ids", "int32"),
                 *((n, "i32") for n in ("count", "rows", "first"))]
    with k.build(arguments) as (value, index, ids, count, rows, first), k.workgroups(_THREADS) as (row, thread):
        best, where = local(1, "float32"), local(1, "int32")
        store(best, 0, f32(float("-inf")))
        store(where, 0, i32(_INT32_MAX))
        with T.serial(i32(0), bind(tirx.truncdiv(count - thread + (_THREADS - 1), i32(_THREADS)))) as turn:
            entry = bind((turn * _THREADS + thread) * rows + row)
            _keep_better(best, where, i32(0), bind(load(value, entry)), bind(load(index, entry)))
        bests, places = k.shared(_THREADS, "float32"), k.shared(_THREADS, "int32")
        store(bests, thread, load(best, 0))
        store(places, thread, load(where, 0))
        barrier()
        half = _THREADS // 2
        while half:
            with T.If(thread < half), T.Then():
                other = bind(thread + half)
                _keep_better(bests, places, thread, bind(load(bests, other)), bind(load(places, other)))
            barrier()
            half //= 2
        with T.If(thread == 0), T.Then():
            store(ids, first + row, load(places, 0))
    return k.kernel


def _keep_better(values: Expr, indices: Expr, place: Expr, value: Expr, index: Expr) -> None:
    """Put a candidate where a worse one is."""
    before, before_index = bind(load(values, place)), bind(load(indices, place))
    better = bind(tirx.any(value > before, tirx.all(value == before, index < before_index)))
    store(values, place, select(better, value, before))
    store(indices, place, select(better, index, before_index))
