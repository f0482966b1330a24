"""Kernels that compute every element on its own: gated units of unlike formats, scales, soft caps."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, Kernel, KernelBuilder, bind, load, store
from dflashc.targets.gpu.kernels.activation import SPAN, THREADS, Staging, split_row
from dflashc.targets.gpu.kernels.elementary import tanh
from dflashc.targets.gpu.kernels.gated import activate
from dflashc.targets.gpu.kernels.quantised_rows import form_arguments
from dflashc.targets.gpu.traits import Traits


def gated(traits: Traits, activation: str, form: str) -> Kernel:
    """h = f(gate) * up, stored in `form`. Workgroup = up to 1024 columns of a row.

    Arguments: gate_up float32 (M, 2 * columns), a row's gates before its ups; the buffers of h; then the scalar
    columns, a multiple of 32 where the form is quantised. Workgroups: M * `activation.spans(columns)`.
    """
    k = KernelBuilder(f"gated_{activation}_{form}", traits)
    arguments = [("gate_up", "float32"), *form_arguments(form, "output"), ("columns", "i32")]
    with k.build(arguments) as (gate_up, *outputs, columns), k.workgroups(THREADS) as (group, thread):
        staging = Staging.declare(k, [form])
        row, first = split_row(group, columns)
        start = bind(row * columns * 2)

        def unit(column: Expr) -> Expr:
            gate = bind(load(gate_up, start + column))
            return activate(activation, gate) * load(gate_up, start + columns + column)

        staging.store_row(thread, first, columns, bind(row * columns), unit, [form], [outputs])
    return k.kernel


def scale(traits: Traits) -> Kernel:
    """output = factor * input. Workgroup = 1024 elements.

    Arguments: input, output float32; then the scalars count, factor (f32).
    """
    return _elementwise(traits, "scale", lambda x, factor: x * factor)


def softcap(traits: Traits) -> Kernel:
    """output = cap * tanh(input / cap). Workgroup = 1024 elements.

    Arguments: input, output float32; then the scalars count, cap (f32).
    """
    return _elementwise(traits, "softcap", lambda x, cap: cap * tanh(bind(x / cap)))


def _elementwise(traits: Traits, name: str, function: Callable[[Expr, Expr], Expr]) -> Kernel:
    k = KernelBuilder(name, traits)
    arguments = [("input", "float32"), ("output", "float32"), ("count", "i32"), ("scalar", "f32")]
    with k.build(arguments) as (source, output, count, scalar), k.workgroups(THREADS) as (group, thread):
        for turn in range(SPAN // THREADS):
            i = bind(group * SPAN + turn * THREADS + thread)
            with T.If(i < count), T.Then():
                store(output, i, function(bind(load(source, i)), scalar))
    return k.kernel
