"""Residual add, RMS norms and quantisation in one kernel: what stands between two matmuls of a layer.

Sums of squares run over fixed lanes in a fixed order, so a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import (
    Expr,
    Kernel,
    KernelBuilder,
    bind,
    cast,
    const,
    i64,
    load,
    local,
    reduce_pairs,
    store,
)
from dflashc.targets.cpu.kernels.activation import declare_form, emit_quantise
from dflashc.targets.cpu.traits import Traits, broadcast, intrinsic

_CHAINS = 2  # independent accumulators; hidden sizes are multiples of 32 = 2 * 16 lanes


def norm_name(residual: bool, post: bool, forms: tuple[str, ...]) -> str:
    return "_".join(["norm", *(["residual"] if residual else []), *(["post"] if post else []), *forms])


def norm(traits: Traits, residual: bool, post: bool, forms: tuple[str, ...]) -> Kernel:
    """x' = x + delta, or x + rms_norm(delta, post_weight); then rms_norm(x', weight) in each of `forms`.

    Unit = one row. Arguments, those in brackets only where asked for:
    x float32 (M, H) [, delta float32 (M, H), x' float32 (M, H)] [, post_weight float32 (H,)]
    [, weight float32 (H,), the normed row's scratch float32 (M, H), the buffers of each form], H, epsilon (f32).
    H must be a multiple of 32. Without `residual`, x' is x and is not written.
    """
    k = KernelBuilder(norm_name(residual, post, forms), traits)
    with k.build():
        x = k.buffer("x", "float32")
        delta = k.buffer("delta", "float32") if residual else None
        total = k.buffer("total", "float32") if residual else x
        post_weight = k.buffer("post_weight", "float32") if post else None
        weight = k.buffer("weight", "float32") if forms else None
        scratch = k.buffer("scratch", "float32") if forms else None
        outputs = [declare_form(k, form, f"output_{form}") for form in forms]
        columns, epsilon = k.scalar("columns"), k.scalar("epsilon", "f32")
        with k.units() as row:
            start = bind(row * columns)
            if delta is not None:
                scale = None if post_weight is None else _inverse_root(traits, delta, start, columns, epsilon)
                _add(traits, x, delta, total, post_weight, scale, start, columns)
            if weight is not None and scratch is not None:
                emit_norm(traits, total, weight, scratch, forms, outputs, start, columns, epsilon)
    return k.kernel


def emit_norm(traits: Traits, source: Expr, weight: Expr, scratch: Expr, forms: Sequence[str],
              outputs: Sequence[Sequence[Expr]], start: Expr, columns: Expr, epsilon: Expr) -> None:
    """rms_norm(source, weight) of the row that starts at `start`, into `scratch` and from there in each of `forms`."""
    _scale(traits, source, scratch, weight, start, columns, epsilon)
    for form, buffers in zip(forms, outputs, strict=True):
        emit_quantise(traits, form, scratch, start, columns, buffers, start)


def _inverse_root(traits: Traits, source: Expr, start: Expr, columns: Expr, epsilon: Expr) -> Expr:
    """1 / sqrt(mean(x^2) + epsilon) of the row at `start`."""
    lanes = traits.lanes
    sums = local(_CHAINS * lanes, "float32")
    for chain in range(_CHAINS):
        store(sums, chain * lanes, const(0.0, traits.f32), lanes)
    with T.serial(i64(0), tirx.floordiv(columns, i64(_CHAINS * lanes))) as step:
        for chain in range(_CHAINS):
            value = bind(load(source, start + step * (_CHAINS * lanes) + chain * lanes, lanes))
            store(sums, chain * lanes, traits.fma(value, value, load(sums, chain * lanes, lanes)), lanes)
    total = reduce_pairs([bind(load(sums, c * lanes, lanes)) for c in range(_CHAINS)], lambda a, b: a + b)
    square_sum = bind(intrinsic("float32", "llvm.vector.reduce.fadd", const(0.0, "float32"), total))
    mean = square_sum / cast("float32", columns)
    return bind(const(1.0, "float32") / intrinsic("float32", "llvm.sqrt", mean + epsilon))


def _add(traits: Traits, x: Expr, delta: Expr, total: Expr, post_weight: Expr | None, scale: Expr | None, start: Expr,
         columns: Expr) -> None:
    lanes = traits.lanes
    with T.serial(i64(0), tirx.floordiv(columns, i64(lanes))) as step:
        offset = bind(start + step * lanes)
        change = load(delta, offset, lanes)
        if post_weight is not None and scale is not None:
            change = bind(change * broadcast(scale, lanes) * load(post_weight, step * lanes, lanes))
        store(total, offset, load(x, offset, lanes) + change, lanes)


def _scale(traits: Traits, source: Expr, target: Expr, weight: Expr, start: Expr, columns: Expr, epsilon: Expr) -> None:
    lanes = traits.lanes
    scale = _inverse_root(traits, source, start, columns, epsilon)
    with T.serial(i64(0), tirx.floordiv(columns, i64(lanes))) as step:
        offset = bind(start + step * lanes)
        value = load(source, offset, lanes) * broadcast(scale, lanes) * load(weight, step * lanes, lanes)
        store(target, offset, value, lanes)
