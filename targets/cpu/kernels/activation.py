"""The forms in which matmuls read their activations, and the code that quantises float32 values into them.

Norms, gated units and the attention merge end with `emit_quantise`, so that a matmul never converts its input. Knows
nothing of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    maximum,
    reduce_pairs,
    store,
)
from dflashc.targets.cpu.kernels.vector_math import absolute, round_to_int, select
from dflashc.targets.cpu.traits import Traits, broadcast, intrinsic


@dataclass(frozen=True)
class FormBuffer:
    """One buffer of a form: an entry of `dtype` per `group` consecutive elements of a row."""

    name: str
    dtype: str
    group: int

    def size(self, rows: int, columns: int) -> int:
        """Entries for a matrix of (rows, columns)."""
        return rows * columns // self.group


@dataclass(frozen=True)
class Form:
    """How a matrix of activations (M, K) is stored; rows are contiguous in every buffer.

    Attributes
    ----------
    group : int
        Elements that share a scale; K must be a multiple of it.
    buffers : tuple of FormBuffer
        In the order in which kernels take them.
    """

    name: str
    group: int
    buffers: tuple[FormBuffer, ...]


_CODES = FormBuffer("codes", "int8", 1)

FORMS: dict[str, Form] = {form.name: form for form in (
    Form("f32", 1, (FormBuffer("values", "float32", 1),)),
    Form("q8_32", 32, (_CODES, FormBuffer("scale", "float32", 32), FormBuffer("sum", "int32", 32))),
    Form("q8_256", 256, (_CODES, FormBuffer("scale", "float32", 256), FormBuffer("sums", "int16", 16))),
)}
"""Symmetric 8-bit forms: scale = max|x| / 127 over a group, code = round_half_even(x * (127 / max|x|)), and the sums of
the codes over 32 or 16 elements, which carry the weights' offsets and minima."""

_TINY = 1e-36  # below it 127 / max|x| would overflow; such a group is stored as zeros


def declare_form(k: KernelBuilder, form: str, prefix: str) -> tuple[Expr, ...]:
    """Declare the buffers of `form` as the next arguments of a kernel, named "`prefix`_codes" and so on."""
    return tuple(k.buffer(f"{prefix}_{buffer.name}", buffer.dtype) for buffer in FORMS[form].buffers)


def emit_quantise(traits: Traits, form: str, source: Expr, source_offset: Expr | int, count: Expr | int,
                  outputs: Sequence[Expr], element: Expr | int) -> None:
    """Emit code that stores `count` consecutive floats of `source` in `form`.

    Parameters
    ----------
    source : buffer of float32
        Global or local; read twice.
    source_offset : int64
        Index of the first float.
    count : int64
        A multiple of the form's group (of the lanes for "f32").
    outputs : sequence of buffers
        The form's buffers, in its order.
    element : int64
        Where the first float belongs in the matrix: row * K + column, a multiple of the form's group.
    """
    group = FORMS[form].group
    start = bind(i64(source_offset) if isinstance(source_offset, int) else source_offset)
    target = bind(i64(element) if isinstance(element, int) else element)
    length = i64(count) if isinstance(count, int) else count
    if form == "f32":
        with T.serial(i64(0), tirx.floordiv(length, i64(traits.lanes))) as i:
            step = bind(i * i64(traits.lanes))
            store(outputs[0], target + step, load(source, start + step, traits.lanes), traits.lanes)
        return
    with T.serial(i64(0), tirx.floordiv(length, i64(group))) as i:
        first = bind(start + i * i64(group))
        maximum_of_group = _largest_magnitude(traits, source, first, group)
        _quantise_group(traits, form, source, first, maximum_of_group, outputs, bind(target + i * i64(group)))


def _largest_magnitude(traits: Traits, source: Expr, first: Expr, group: int) -> Expr:
    """max |x| over a group; NaN is passed over."""
    lanes = traits.lanes
    chains = 32 // lanes
    running: list[Expr] = [absolute(load(source, first + i64(c * lanes), lanes)) for c in range(chains)]
    for step in range(1, group // 32):
        running = [bind(maximum(running[c], absolute(load(source, first + i64(step * 32 + c * lanes), lanes))))
                   for c in range(chains)]
    return bind(intrinsic("float32", "llvm.vector.reduce.fmax", reduce_pairs([bind(r) for r in running], maximum)))


def _quantise_group(traits: Traits, form: str, source: Expr, first: Expr, largest: Expr, outputs: Sequence[Expr],
                    target: Expr) -> None:
    lanes = traits.lanes
    codes, scale, sums = outputs
    group, sum_group = FORMS[form].group, FORMS[form].buffers[2].group
    usable = largest > const(_TINY, "float32")
    store(scale, tirx.floordiv(target, i64(group)),
          select(usable, largest / const(127.0, "float32"), const(0.0, "float32")))
    inverse = bind(select(usable, const(127.0, "float32") / largest, const(0.0, "float32")))
    with T.serial(i64(0), i64(group // sum_group)) as part:
        partial = []
        offset = bind(part * i64(sum_group))
        for c in range(0, sum_group, lanes):
            code = bind(round_to_int(load(source, first + offset + i64(c), lanes) * broadcast(inverse, lanes)))
            store(codes, target + offset + i64(c), cast(f"int8x{lanes}", code), lanes)
            partial.append(code)
        total = intrinsic("int32", "llvm.vector.reduce.add", reduce_pairs(partial, lambda a, b: a + b))
        store(sums, tirx.floordiv(target + offset, i64(sum_group)),
              total if form == "q8_32" else cast("int16", total))


def quantise(traits: Traits, form: str) -> Kernel:
    """Quantise a float32 matrix. Unit = one row.

    Arguments: input (M, K) float32, the buffers of `form`, columns K.
    """
    k = KernelBuilder(f"quantise_{form}", traits)
    with k.build():
        source = k.buffer("input", "float32")
        outputs = declare_form(k, form, "output")
        columns = k.scalar("columns")
        with k.units() as row:
            emit_quantise(traits, form, source, row * columns, columns, outputs, row * columns)
    return k.kernel
