"""Rows of floats in the forms that matmuls read: a workgroup computes columns, stages them, stores them.

Norms, gated units, taps and the attention merge end with `Staging.store_row`, so that a matmul never converts its
input. The 8-bit form itself is `quantised_rows`'. Knows nothing of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, Kernel, KernelBuilder, barrier, bind, i32, load, store
from dflashc.targets.gpu.kernels.quantised_rows import GROUP, PITCH, emit_group, form_arguments
from dflashc.targets.gpu.traits import Traits

THREADS = 256
SPAN = 1024
"""Columns of a workgroup of the kernels that compute each column on its own."""


def spans(columns: int) -> int:
    """Workgroups for a row of such a kernel."""
    return math.ceil(columns / SPAN)


@dataclass(frozen=True)
class Staging:
    """Shared memory in which a workgroup of 256 threads holds up to `span` columns of a row, a multiple of 256."""

    values: Expr | None
    span: int

    @staticmethod
    def declare(k: KernelBuilder, forms: Sequence[str], span: int = SPAN) -> Staging:
        quantised = any(form != "f32" for form in forms)
        return Staging(k.shared(span // GROUP * PITCH, "float32") if quantised else None, span)

    def store_row(self, thread: Expr, first: Expr, columns: Expr, element: Expr, value: Callable[[Expr], Expr],
                  forms: Sequence[str], outputs: Sequence[Sequence[Expr]]) -> None:
        """Store value(column) for up to `span` columns from `first` on, those below `columns`, in each form.

        Parameters
        ----------
        first, columns : int32
            Multiples of 32 where a form is quantised.
        element : int32
            Where column 0 belongs in the matrix, likewise.
        outputs : sequence of sequences of buffers
            Per form its buffers.
        """
        plain = [buffers[0] for form, buffers in zip(forms, outputs, strict=True) if form == "f32"]
        quantised = [buffers for form, buffers in zip(forms, outputs, strict=True) if form != "f32"]
        with T.serial(i32(0), i32(self.span // THREADS)) as turn:
            offset = bind(thread + turn * THREADS)
            column = bind(first + offset)
            with T.If(column < columns), T.Then():
                result = bind(value(column))
                for buffer in plain:
                    store(buffer, element + column, result)
                if quantised:
                    store(self.values, offset + tirx.truncdiv(offset, i32(GROUP)) * (PITCH - GROUP), result)
        if not quantised:
            return
        barrier()
        with T.If(tirx.all(thread < self.span // GROUP, first + thread * GROUP < columns)), T.Then():
            for buffers in quantised:
                emit_group(self.values, bind(thread * PITCH), buffers,
                           bind(tirx.truncdiv(element + first, i32(GROUP)) + thread))
        barrier()


def quantise(traits: Traits, form: str) -> Kernel:
    """output[m, column + c] = input[m, c], stored in `form`. Workgroup = up to 1024 columns of a row.

    Arguments: input float32 (M, C), the buffers of the output (M, leading); then the scalars columns (C), leading,
    column; all three multiples of 32 where the form is quantised. Workgroups: M * `spans(C)`.
    """
    k = KernelBuilder(f"quantise_{form}", traits)
    arguments = [("input", "float32"), *form_arguments(form, "output"), *((n, "i32") for n in
                 ("columns", "leading", "column"))]
    with k.build(arguments) as (source, *outputs, columns, leading, column), k.workgroups(THREADS) as (group, thread):
        staging = Staging.declare(k, [form])
        row, first = split_row(group, columns)
        staging.store_row(thread, first, columns, bind(row * leading + column),
                          lambda c: load(source, row * columns + c), [form], [outputs])
    return k.kernel


def split_row(group: Expr, columns: Expr) -> tuple[Expr, Expr]:
    """The row of a workgroup of 1024 columns, and its first column."""
    per_row = bind(tirx.truncdiv(columns + (SPAN - 1), i32(SPAN)))
    return bind(tirx.truncdiv(group, per_row)), bind(tirx.truncmod(group, per_row) * SPAN)
