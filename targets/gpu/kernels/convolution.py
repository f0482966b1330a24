"""DFlash2's convolutions over the rows of a block, one before and one after each sublayer.

y[i, c] = sum_t (base[side, t, c] + dynamic[i, side, t, c // group_size]) * x[i - t, c], taps before row 0 being zero.
The dynamic weights of both sides are one matmul of the sublayer's normed input u. Knows nothing of sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, Kernel, KernelBuilder, barrier, bind, f32, fma, i32, load, local, store
from dflashc.targets.gpu.kernels.activation import THREADS, Staging
from dflashc.targets.gpu.kernels.codes import PackedRow
from dflashc.targets.gpu.kernels.norm import SPAN, emit_norm
from dflashc.targets.gpu.kernels.quantised_rows import GROUP, PITCH, emit_group, form_arguments
from dflashc.targets.gpu.kernels.reduction import SCRATCH
from dflashc.targets.gpu.kernels.row_groups import ROWS, Products, activation_arguments, packed_row
from dflashc.targets.gpu.kernels.shares import Share, declare_products, emit_products
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS

MOST_PASSES = 8
_CHUNK = 128
"""Channels that are staged at once."""


@dataclass(frozen=True)
class _Convolution:
    """One side's convolution of `source` (M, H), with base weights (2, taps, H)."""

    taps: int
    side: int
    source: Expr
    base: Expr
    columns: Expr

    def value(self, row: Expr, channel: Expr, dynamic: Sequence[Expr]) -> Expr:
        """y[row, channel]; `dynamic` has the dynamic weight of each tap."""
        total, value = f32(0), local(1, "float32")
        for tap, weight in enumerate(dynamic):
            fixed = load(self.base, (self.side * self.taps + tap) * self.columns + channel)
            store(value, 0, f32(0))
            with T.If(row >= tap), T.Then():
                store(value, 0, load(self.source, (row - tap) * self.columns + channel))
            total = bind(fma(fixed + weight, load(value, 0), total))
        return total


def convolution_groups(taps: int, group_size: int, form: str) -> int:
    """Groups of channels of a workgroup of `convolution_matmul`: whole groups of the form, and dynamic weights of both
    sides that fill a pass of the matmul where they can.
    """
    step = math.lcm(group_size, GROUP) // group_size if form != "f32" else 1
    return max(1, ROWS // (2 * taps) // step) * step


def matmul_passes(taps: int, group_size: int, form: str) -> int:
    """Passes of 32 weight rows that give a workgroup's dynamic weights; at most `MOST_PASSES` fit its memory."""
    return math.ceil(2 * taps * convolution_groups(taps, group_size, form) / ROWS)


def convolution_matmul(traits: Traits, format_name: str, share: Share, taps: int, group_size: int,
                       form: str) -> Kernel:
    """The dynamic weights P u of both sides, and side 0's convolution of u.

    Workgroup = `convolution_groups` groups of channels, of the last one those that are left.

    Parameters
    ----------
    share : Share
        Of a pass: all rows M of the block, at most 16; 32 weight rows.
    taps, group_size : int
        Rows that an output sees; channels that share a dynamic weight, a divisor of H.
    form : str
        Form of the result. H must be a multiple of 32.

    Notes
    -----
    Arguments: u in the form of the weight, u float32 (M, H), weight (P, 2 * taps * H / group_size rows of H columns:
    side major, then tap), base float32 (2, taps, H), the buffers of the result (M, H), dynamic float32
    (M, taps * H / group_size) of side 1; then the scalar columns (H).
    """
    layout, rows = PACKED_FORMATS[format_name], share.rows
    own_groups, kernels = convolution_groups(taps, group_size, form), 2 * taps
    passes = matmul_passes(taps, group_size, form)
    k = KernelBuilder("convolution_matmul", traits)
    inputs, outputs = activation_arguments(format_name), form_arguments(form, "output")
    arguments = [*inputs, ("u", "float32"), ("weight", "uint32"), ("base", "float32"), *outputs,
                 ("dynamic", "float32"), ("columns", "i32")]
    with k.build(arguments) as operands:
        activations, (u, weight, base) = operands[: len(inputs)], operands[len(inputs) : len(inputs) + 3]
        results, (dynamic, columns) = operands[len(inputs) + 3 : -2], operands[-2:]
        with k.workgroups(THREADS) as (group, thread):
            products, own = declare_products(k, layout, share), k.shared(rows * passes * ROWS, "float32")
            groups = bind(tirx.truncdiv(columns, i32(group_size)))
            first_group = bind(group * own_groups)
            with T.serial(i32(0), i32(passes)) as step:
                first_place = bind(step * ROWS)

                def weight_row(place: Expr, first_place: Expr = first_place) -> PackedRow:
                    at = bind(place + first_place)
                    kernel = tirx.min(tirx.truncdiv(at, i32(own_groups)), i32(kernels - 1))
                    number = tirx.min(first_group + tirx.truncmod(at, i32(own_groups)), groups - 1)
                    return packed_row(traits, layout, weight, bind(kernel * groups + number), columns)

                emit_products(traits, layout, share, weight_row, thread, activations, i32(0), products)
                _collect(products, thread, own, step, passes)
                barrier()
            weights = _OwnWeights(own, taps, own_groups, passes * ROWS)
            weights.store_second_side(thread, rows, dynamic, first_group, groups)
            _convolve(_Convolution(taps, 0, u, base, columns), weights, thread, rows, group_size,
                      bind(first_group * group_size), products.sums, form, results)
    return k.kernel


def _collect(products: Products, thread: Expr, own: Expr, step: Expr, passes: int) -> None:
    """The products of a pass into `own` (rows, passes * 32)."""
    for turn in range(math.ceil(products.entries() / THREADS)):
        entry = bind(thread + turn * THREADS)
        row, place = bind(tirx.truncdiv(entry, i32(ROWS))), bind(tirx.truncmod(entry, i32(ROWS)))
        with T.If(entry < products.entries()), T.Then():
            store(own, (row * passes + step) * ROWS + place, products.total(entry))


@dataclass(frozen=True)
class _OwnWeights:
    """A workgroup's dynamic weights of all rows, in shared memory: [row][(side, tap)][group], `pitch` floats a row."""

    values: Expr
    taps: int
    groups: int
    pitch: int

    def weight(self, row: Expr, kernel: Expr | int, group: Expr) -> Expr:
        """Of (side, tap) number `kernel`."""
        return load(self.values, row * self.pitch + kernel * self.groups + group)

    def store_second_side(self, thread: Expr, rows: int, dynamic: Expr, first_group: Expr, groups: Expr) -> None:
        """What the convolution after the sublayer needs, into `dynamic` (M, taps, groups)."""
        count = rows * self.taps * self.groups
        with T.serial(i32(0), i32(math.ceil(count / THREADS))) as turn:
            entry = bind(turn * THREADS + thread)
            row = bind(tirx.truncdiv(entry, i32(self.taps * self.groups)))
            tap = bind(tirx.truncmod(tirx.truncdiv(entry, i32(self.groups)), i32(self.taps)))
            group = bind(tirx.truncmod(entry, i32(self.groups)))
            with T.If(tirx.all(entry < count, first_group + group < groups)), T.Then():
                store(dynamic, (row * self.taps + tap) * groups + first_group + group,
                      self.weight(row, self.taps + tap, group))


def _convolve(convolution: _Convolution, weights: _OwnWeights, thread: Expr, rows: int, group_size: int, first: Expr,
              staged: Expr, form: str, results: Sequence[Expr]) -> None:
    """The convolution of the workgroup's channels, from `first` on, in `form`; `staged` holds 256 floats a row."""
    columns, channels = convolution.columns, weights.groups * group_size
    with T.serial(i32(0), i32(math.ceil(channels / _CHUNK))) as chunk:
        with T.serial(i32(0), i32(math.ceil(rows * _CHUNK / THREADS))) as turn:
            entry = bind(turn * THREADS + thread)
            row, offset = bind(tirx.truncdiv(entry, i32(_CHUNK))), bind(tirx.truncmod(entry, i32(_CHUNK)))
            channel = bind(chunk * _CHUNK + offset)
            with T.If(tirx.all(row < rows, channel < channels, first + channel < columns)), T.Then():
                group = bind(tirx.truncdiv(channel, i32(group_size)))
                dynamic = [weights.weight(row, tap, group) for tap in range(convolution.taps)]
                value = convolution.value(row, bind(first + channel), dynamic)
                if form == "f32":
                    store(results[0], row * columns + first + channel, value)
                else:
                    store(staged, entry + tirx.truncdiv(entry, i32(GROUP)) * (PITCH - GROUP), value)
        if form != "f32":
            barrier()
            row = bind(tirx.truncdiv(thread, i32(_CHUNK // GROUP)))
            channel = bind(chunk * _CHUNK + tirx.truncmod(thread, i32(_CHUNK // GROUP)) * GROUP)
            with T.If(tirx.all(row < rows, channel < channels, first + channel < columns)), T.Then():
                emit_group(staged, bind(thread * PITCH), results,
                           bind(tirx.truncdiv(row * columns + first + channel, i32(GROUP))))
            barrier()


def norm_convolution(traits: Traits, taps: int, group_size: int, forms: tuple[str, ...]) -> Kernel:
    """x' = x + the convolution of side 1 of z; then rms_norm(x', weight) in each of `forms`. Workgroup = one row.

    Parameters
    ----------
    taps, group_size : int
        As in `convolution_matmul`.
    forms : tuple of str
        Without any, x' is all. H must be a multiple of 32.

    Notes
    -----
    Arguments: x, z float32 (M, H), dynamic float32 (M, taps * H / group_size), base float32 (2, taps, H),
    x' float32 (M, H) [, weight float32 (H,), the buffers of each form]; then the scalars columns (H), epsilon (f32).
    """
    k = KernelBuilder("_".join([f"norm_convolution_t{taps}_g{group_size}", *forms]), traits)
    outputs = [form_arguments(form, f"output_{form}") for form in forms]
    arguments = [*((n, "float32") for n in ("x", "z", "dynamic", "base", "total", *(["weight"] if forms else []))),
                 *(argument for form in outputs for argument in form), ("columns", "i32"), ("epsilon", "f32")]
    with k.build(arguments) as values:
        named = dict(zip((name for name, _ in arguments), values, strict=True))
        x, total, columns = named["x"], named["total"], named["columns"]
        with k.workgroups(THREADS) as (row, thread):
            scratch, staging = k.shared(SCRATCH, "float32"), Staging.declare(k, forms, SPAN)
            start, groups = bind(row * columns), bind(tirx.truncdiv(columns, i32(group_size)))
            convolution = _Convolution(taps, 1, named["z"], named["base"], columns)
            with T.serial(i32(0), bind(tirx.truncdiv(columns - thread + (THREADS - 1), i32(THREADS)))) as turn:
                channel = bind(thread + turn * THREADS)
                group = bind(tirx.truncdiv(channel, i32(group_size)))
                dynamic = [load(named["dynamic"], (row * taps + tap) * groups + group) for tap in range(taps)]
                value = convolution.value(row, channel, dynamic)
                store(total, start + channel, load(x, start + channel) + value)
            if forms:
                emit_norm(staging, scratch, total, named["weight"], start, thread, columns, named["epsilon"], forms,
                          [[named[name] for name, _ in form] for form in outputs])
    return k.kernel
