"""Greedy heads: the best token of each row without logits in memory; and the soft cap for heads that store logits.

Ties go to the lowest index. NaN never wins; a row of NaN alone gives index 0.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, cast, const, i64, load, local, store
from dflashc.targets.cpu.kernels.activation import declare_form
from dflashc.targets.cpu.kernels.row_groups import row_group_products
from dflashc.targets.cpu.kernels.tiles import row_chunks, row_tiles, rows_name
from dflashc.targets.cpu.kernels.vector_math import select, tanh
from dflashc.targets.cpu.traits import Traits, broadcast, intrinsic
from dflashc.targets.packing import PACKED_FORMATS

ARGMAX_UNIT = 256
"""Weight rows of a unit of `matmul_argmax`."""

SOFTCAP_UNIT = 1024
"""Values of a unit of `softcap`."""

_LOWEST = float("-inf")
_INT32_MAX = (1 << 31) - 1


def matmul_argmax(traits: Traits, format_name: str, rows: int | None) -> Kernel:
    """The best of x[m] . w[r] over each 256 weight rows. Unit = 256 weight rows.

    Parameters
    ----------
    rows : int or None
        Activation rows M, at most 16; None for a runtime number, a multiple of 16.

    Notes
    -----
    Arguments: the activation's buffers, weight uint8, value float32 (units, M), index int32 (units, M); then the
    scalars [rows,] columns (K), weight_rows.
    """
    layout = PACKED_FORMATS[format_name]
    lanes = traits.lanes
    k = KernelBuilder(f"matmul_argmax_{format_name}_{rows_name(rows)}", traits)
    with k.build():
        activations = declare_form(k, layout.form, "input")
        weight = k.buffer("weight", "uint8")
        value, index = k.buffer("value", "float32"), k.buffer("index", "int32")
        count = k.scalar("rows") if rows is None else i64(rows)
        columns, weight_rows = k.scalar("columns"), k.scalar("weight_rows")
        with k.units() as unit, row_chunks(count if rows is None else rows) as (first_row, size):
            first = bind(unit * i64(ARGMAX_UNIT))
            best, where = local(size * lanes, "float32"), local(size * lanes, "int32")
            with T.serial(i64(0), i64(size)) as m:
                store(best, m * i64(lanes), const(_LOWEST, traits.f32), lanes)
                store(where, m * i64(lanes), _lane_indices(traits, first), lanes)
            left = tirx.min(weight_rows - first, i64(ARGMAX_UNIT))
            with T.serial(i64(0), tirx.floordiv(left + i64(lanes - 1), i64(lanes))) as g, \
                    row_tiles(traits, first_row, size) as tile:
                group = bind(unit * i64(ARGMAX_UNIT // lanes) + g)
                products = row_group_products(traits, layout, weight, group, activations, tile, columns)
                indices = bind(_lane_indices(traits, bind(group * i64(lanes))))
                exists = indices < broadcast(cast("int32", weight_rows), lanes)
                for row, product in zip(tile.rows, products, strict=True):
                    _keep_better(traits, best, where, bind((row - first_row) * i64(lanes)), product, indices, exists)
            with T.serial(i64(0), i64(size)) as m:
                _reduce_lanes(traits, best, where, bind(m * i64(lanes)), value, index,
                              bind(unit * count + first_row + m))
    return k.kernel


def _lane_indices(traits: Traits, first: Expr) -> Expr:
    """first, first + 1, …: the weight rows of the lanes."""
    return tirx.Ramp(cast("int32", first), tirx.const(1, "int32"), traits.lanes)


def _keep_better(traits: Traits, best: Expr, where: Expr, slot: Expr, product: Expr, indices: Expr,
                 exists: Expr) -> None:
    """Lane by lane keep the larger value; the earlier one where they are equal."""
    lanes = traits.lanes
    candidate = bind(select(exists, product, const(_LOWEST, traits.f32)))
    before = bind(load(best, slot, lanes))
    better = candidate > before  # a bound vector of bools would fail in TVM's analyser
    store(best, slot, select(better, candidate, before), lanes)
    store(where, slot, select(better, indices, load(where, slot, lanes)), lanes)


def _reduce_lanes(traits: Traits, best: Expr, where: Expr, slot: Expr, value: Expr, index: Expr, target: Expr) -> None:
    """The best lane, and among equals the lowest index."""
    lanes = traits.lanes
    values = bind(load(best, slot, lanes))
    largest = bind(intrinsic("float32", "llvm.vector.reduce.fmax", values))
    store(value, target, largest)
    candidates = select(values >= broadcast(largest, lanes), load(where, slot, lanes), const(_INT32_MAX, traits.i32))
    store(index, target, intrinsic("int32", "llvm.vector.reduce.smin", candidates))


def argmax_reduce(traits: Traits, ids_of: str = "rows") -> Kernel:
    """The best of the partial results of `matmul_argmax`. Unit = one row.

    Parameters
    ----------
    ids_of : str
        "rows" for the indices of weight rows, "d2t" to look them up.

    Notes
    -----
    Arguments: value float32 (count, M), index int32 (count, M) [, d2t int32], ids int32 (M); then the scalars count,
    rows (M).
    """
    k = KernelBuilder(f"argmax_reduce_{ids_of}", traits)
    with k.build():
        value, index = k.buffer("value", "float32"), k.buffer("index", "int32")
        d2t = k.buffer("d2t", "int32") if ids_of == "d2t" else None
        ids = k.buffer("ids", "int32")
        count, rows = k.scalar("count"), k.scalar("rows")
        with k.units() as m:
            best, where = local(1, "float32"), local(1, "int32")
            store(best, 0, load(value, m))
            store(where, 0, load(index, m))
            with T.serial(i64(1), count) as unit:
                entry = bind(unit * rows + m)
                candidate = bind(load(value, entry))
                better = bind(candidate > load(best, 0))
                store(best, 0, select(better, candidate, load(best, 0)))
                store(where, 0, select(better, load(index, entry), load(where, 0)))
            best_row = load(where, 0)
            store(ids, m, best_row if d2t is None else load(d2t, cast("int64", best_row)))
    return k.kernel


def scale(traits: Traits) -> Kernel:
    """y = factor * x. Units and arguments as in `softcap`, with the factor (f32) for the cap."""
    return _elementwise("scale", traits, lambda x, factor: x * factor)


def softcap(traits: Traits) -> Kernel:
    """y = cap * tanh(x / cap). Unit = 1024 values: ceil(count / 1024) units.

    Arguments: input float32, output float32; then the scalars count, cap (f32).
    """
    return _elementwise("softcap", traits, lambda x, cap: cap * tanh(traits, bind(x / cap)))


def _elementwise(name: str, traits: Traits, function: Callable[[Expr, Expr], Expr]) -> Kernel:
    """y = function(x, scalar), see `softcap`."""
    k = KernelBuilder(name, traits)
    lanes = traits.lanes
    with k.build():
        source, output = k.buffer("input", "float32"), k.buffer("output", "float32")
        count, scalar = k.scalar("count"), k.scalar("scalar", "f32")

        def apply(offset: Expr, width: int) -> None:
            factor = scalar if width == 1 else broadcast(scalar, width)
            store(output, offset, function(load(source, offset, width), factor), width)

        with k.units() as unit:
            first = bind(unit * i64(SOFTCAP_UNIT))
            size = bind(tirx.min(count - first, i64(SOFTCAP_UNIT)))
            whole = bind(tirx.floordiv(size, i64(lanes)))
            with T.serial(i64(0), whole) as step:
                apply(bind(first + step * i64(lanes)), lanes)
            with T.serial(whole * i64(lanes), size) as offset:
                apply(bind(first + offset), 1)
    return k.kernel
