"""Residual add, RMS norms and quantisation in one kernel: what stands between two matmuls of a layer."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Expr,
    Kernel,
    KernelBuilder,
    bind,
    cast,
    f32,
    fma,
    i32,
    load,
    local,
    store,
)
from dflashc.targets.gpu.kernels.activation import THREADS, Staging
from dflashc.targets.gpu.kernels.quantised_rows import form_arguments
from dflashc.targets.gpu.kernels.reduction import SCRATCH, workgroup_sum
from dflashc.targets.gpu.traits import Traits

SPAN = 4096
"""Columns of a row that are staged at once."""


def norm_name(residual: bool, post: bool, forms: tuple[str, ...]) -> str:
    return "_".join(["norm", *(["residual"] if residual else []), *(["post"] if post else []), *forms])


def norm(traits: Traits, residual: bool, post: bool, forms: tuple[str, ...]) -> Kernel:
    """x' = x + delta, or x + rms_norm(delta, post_weight); then rms_norm(x', weight) in each of `forms`.

    Workgroup = one row. Arguments, those in brackets only where asked for:
    x float32 (M, H) [, delta float32 (M, H), x' float32 (M, H)] [, post_weight float32 (H,)]
    [, weight float32 (H,), the buffers of each form]; then the scalars H, epsilon (f32).
    H must be a multiple of 32. Without `residual`, x' is x and is not written.
    """
    k = KernelBuilder(norm_name(residual, post, forms), traits)
    outputs = [form_arguments(form, f"output_{form}") for form in forms]
    arguments = [("x", "float32"), *([("delta", "float32"), ("total", "float32")] if residual else []),
                 *([("post_weight", "float32")] if post else []), *([("weight", "float32")] if forms else []),
                 *(argument for form in outputs for argument in form), ("columns", "i32"), ("epsilon", "f32")]
    with k.build(arguments) as values:
        named = dict(zip((name for name, _ in arguments), values, strict=True))
        x, columns, epsilon = named["x"], named["columns"], named["epsilon"]
        delta, total, post_weight = (named.get(name) for name in ("delta", "total", "post_weight"))
        with k.workgroups(THREADS) as (row, thread):
            scratch = k.shared(SCRATCH, "float32")
            staging = Staging.declare(k, forms, SPAN)
            start = bind(row * columns)
            if delta is not None:
                scale = None
                if post_weight is not None:
                    scale = _inverse_root(scratch, thread, columns, epsilon, lambda c: load(delta, start + c))
                _add(x, delta, total, post_weight, scale, start, thread, columns)
            if forms:
                emit_norm(staging, scratch, total if residual else x, named["weight"], start, thread, columns, epsilon,
                          forms, [[named[name] for name, _ in form] for form in outputs])
    return k.kernel


def emit_norm(staging: Staging, scratch: Expr, source: Expr, weight: Expr, start: Expr, thread: Expr, columns: Expr,
              epsilon: Expr, forms: tuple[str, ...], outputs: list[list[Expr]]) -> None:
    """rms_norm(source, weight) of the row that starts at `start`, in each of `forms`.

    A thread reads the columns c of `source` with c mod 256 = `thread`, which may be its own stores of just now.
    """
    scale = _inverse_root(scratch, thread, columns, epsilon, lambda c: load(source, start + c))
    with T.serial(i32(0), tirx.truncdiv(columns + (staging.span - 1), i32(staging.span))) as step:
        staging.store_row(thread, bind(step * staging.span), columns, start,
                          lambda c: load(source, start + c) * scale * load(weight, c), forms, outputs)


def _columns(thread: Expr, columns: Expr, body: Callable[[Expr], None]) -> None:
    """`body` for this thread's share of the columns."""
    with T.serial(i32(0), tirx.truncdiv(columns - thread + (THREADS - 1), i32(THREADS))) as turn:
        body(bind(thread + turn * THREADS))


def _inverse_root(scratch: Expr, thread: Expr, columns: Expr, epsilon: Expr, value: Callable[[Expr], Expr]) -> Expr:
    """1 / sqrt(mean(x^2) + epsilon) of the row of values."""
    squares = local(1, "float32")
    store(squares, 0, f32(0))

    def add_square(column: Expr) -> None:
        x = bind(value(column))
        store(squares, 0, fma(x, x, load(squares, 0)))

    _columns(thread, columns, add_square)
    total = workgroup_sum(scratch, thread, load(squares, 0))
    return bind(f32(1) / tirx.sqrt(total / cast("float32", columns) + epsilon))


def _add(x: Expr, delta: Expr, total: Expr, post_weight: Expr | None, scale: Expr | None, start: Expr, thread: Expr,
         columns: Expr) -> None:
    def add(column: Expr) -> None:
        change = load(delta, start + column)
        if post_weight is None:
            store(total, start + column, load(x, start + column) + change)
        else:
            store(total, start + column, fma(bind(change * scale), load(post_weight, column), load(x, start + column)))

    _columns(thread, columns, add)
