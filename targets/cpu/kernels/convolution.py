"""DFlash2's convolutions over the rows of a block, one before and one after each sublayer.

y[i, c] = sum_t (base[side, t, c] + dynamic[i, side, t, c // group_size]) * x[i - t, c], taps before row 0 being zero.
The dynamic weights of both sides are one matmul of the sublayer's normed input u. Knows nothing of sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, const, i64, load, local, store
from dflashc.targets.cpu.kernels.activation import FORMS, declare_form, emit_quantise
from dflashc.targets.cpu.kernels.norm import emit_norm
from dflashc.targets.cpu.kernels.row_groups import row_group_products
from dflashc.targets.cpu.kernels.tiles import row_tiles
from dflashc.targets.cpu.kernels.vector_math import select
from dflashc.targets.cpu.traits import Traits, broadcast
from dflashc.targets.packing import PACKED_FORMATS, PackedFormat


@dataclass(frozen=True)
class _Convolution:
    """One side's convolution of `source` (M, H), with base weights (2, taps, H)."""

    traits: Traits
    taps: int
    group_size: int
    side: int
    source: Expr
    base: Expr
    columns: Expr

    @contextmanager
    def vectors(self, row: Expr, first: Expr, dynamic: Sequence[Expr]) -> Iterator[tuple[Expr, Expr, int]]:
        """Loop over the channels of the group that starts at `first`; gives a channel, the outputs from it on, and how
        many they are. `dynamic` has the group's dynamic weight of each tap.
        """
        width = math.gcd(self.group_size, self.traits.lanes)
        dtype = f"float32x{width}" if width > 1 else "float32"
        with T.serial(i64(0), i64(self.group_size // width)) as i:
            channel = bind(first + i * width)
            total = const(0, dtype)
            for tap, weight in enumerate(dynamic):
                fixed = load(self.base, i64(self.side * self.taps + tap) * self.columns + channel, width)
                factor = bind(fixed + (broadcast(weight, width) if width > 1 else weight))
                at = bind(tirx.max(row - tap, i64(0)) * self.columns + channel)
                value = select(row >= i64(tap), load(self.source, at, width), const(0, dtype))
                total = bind(self.traits.fma(factor, bind(value), total))
            yield channel, total, width


@dataclass(frozen=True)
class _DynamicWeights:
    """A unit's dynamic weights of all rows, local [rows][2 * taps][pitch], computed in whole row groups of P."""

    traits: Traits
    rows: int
    kernels: int
    pitch: int
    groups: Expr
    first_group: Expr
    values: Expr

    def _first(self, kernel: Expr | int) -> Expr:
        """The row of P that the unit needs first of (side, tap) number `kernel`."""
        return bind(kernel * self.groups + self.first_group)

    def compute(self, layout: PackedFormat, weight: Expr, activations: Sequence[Expr], columns: Expr,
                group_count: Expr) -> None:
        lanes = self.traits.lanes
        with T.serial(i64(0), i64(self.kernels)) as kernel:
            first = self._first(kernel)
            first_row_group = bind(tirx.floordiv(first, i64(lanes)))
            count = tirx.floordiv(first + group_count - 1, i64(lanes)) - first_row_group + 1
            with T.serial(i64(0), count) as g, row_tiles(self.traits, i64(0), self.rows) as tile:
                row_group = bind(first_row_group + g)
                products = row_group_products(self.traits, layout, weight, row_group, activations, tile, columns)
                for row, product in zip(tile.rows, products, strict=True):
                    store(self.values, (row * self.kernels + kernel) * self.pitch + g * lanes, product, lanes)

    def start(self, row: Expr, kernel: int) -> Expr:
        """Where the unit's weights of a row and (side, tap) start in `values`."""
        lane = tirx.floormod(self._first(kernel), i64(self.traits.lanes))
        return bind((row * self.kernels + kernel) * self.pitch + lane)


def convolution_unit(traits: Traits, group_size: int, form: str) -> int:
    """Channels of a unit of `convolution_matmul`: whole groups of the form, and a row group of dynamic weights."""
    return math.lcm(traits.lanes * group_size, FORMS[form].group)


def convolution_matmul(traits: Traits, format_name: str, rows: int, taps: int, group_size: int, form: str) -> Kernel:
    """The dynamic weights P u of both sides, and side 0's convolution of u.

    Unit = `convolution_unit` channels, of the last unit those that are left: ceil(H / convolution_unit) units.

    Parameters
    ----------
    rows : int
        Rows M of the block, at most 16.
    taps, group_size : int
        Rows that an output sees; channels that share a dynamic weight, at most 64 and a divisor of H.
    form : str
        Form of the result. H must be a multiple of its group and of 32.

    Notes
    -----
    Arguments: u in the form of the weight, u float32 (M, H), weight uint8 (P, 2 * taps * H / group_size rows of H
    columns: side major, then tap), base float32 (2, taps, H), the buffers of the result (M, H), dynamic float32
    (M, taps * H / group_size) of side 1; then the scalar columns (H).
    """
    layout = PACKED_FORMATS[format_name]
    lanes, channels = traits.lanes, convolution_unit(traits, group_size, form)
    kernels = 2 * taps
    pitch = -(-channels // (group_size * lanes)) * lanes + lanes  # one row group more where they are not aligned
    k = KernelBuilder(f"convolution_matmul_{format_name}_{rows}_t{taps}_g{group_size}_{form}", traits)
    with k.build():
        activations = declare_form(k, layout.form, "input")
        u, weight, base = k.buffer("u", "float32"), k.buffer("weight", "uint8"), k.buffer("base", "float32")
        outputs = declare_form(k, form, "output")
        dynamic, columns = k.buffer("dynamic", "float32"), k.scalar("columns")
        groups = bind(tirx.floordiv(columns, i64(group_size)))
        convolution = _Convolution(traits, taps, group_size, 0, u, base, columns)
        with k.units() as unit:
            first = bind(unit * i64(channels))
            first_group = bind(tirx.floordiv(first, i64(group_size)))
            count = bind(tirx.min(columns - first, i64(channels)))
            group_count = bind(tirx.floordiv(count, i64(group_size)))
            values = local(rows * kernels * pitch, "float32")
            weights = _DynamicWeights(traits, rows, kernels, pitch, groups, first_group, values)
            weights.compute(layout, weight, activations, columns, group_count)
            result = local(channels, "float32")
            with T.serial(i64(0), i64(rows)) as row:
                starts = [weights.start(row, kernel) for kernel in range(kernels)]
                with T.serial(i64(0), group_count) as group:
                    own = [bind(load(values, start + group)) for start in starts]
                    for tap in range(taps):
                        store(dynamic, (row * taps + tap) * groups + first_group + group, own[taps + tap])
                    with convolution.vectors(row, first + group * group_size, own[:taps]) as (channel, value, width):
                        store(result, channel - first, value, width)
                emit_quantise(traits, form, result, 0, count, outputs, row * columns + first)
    return k.kernel


def norm_convolution(traits: Traits, taps: int, group_size: int, forms: tuple[str, ...]) -> Kernel:
    """x' = x + the convolution of side 1 of z; then rms_norm(x', weight) in each of `forms`. Unit = one row.

    Parameters
    ----------
    taps, group_size : int
        As in `convolution_matmul`.
    forms : tuple of str
        Without any, x' is all. H must be a multiple of 32 and of the forms' groups.

    Notes
    -----
    Arguments: x, z float32 (M, H), dynamic float32 (M, taps * H / group_size), base float32 (2, taps, H),
    x' float32 (M, H) [, weight float32 (H,), the normed row's scratch float32 (M, H), the buffers of each form]; then
    the scalars columns (H), epsilon (f32).
    """
    k = KernelBuilder("_".join([f"norm_convolution_t{taps}_g{group_size}", *forms]), traits)
    with k.build():
        x, z, dynamic = k.buffer("x", "float32"), k.buffer("z", "float32"), k.buffer("dynamic", "float32")
        base, total = k.buffer("base", "float32"), k.buffer("total", "float32")
        weight = k.buffer("weight", "float32") if forms else None
        scratch = k.buffer("scratch", "float32") if forms else None
        outputs = [declare_form(k, form, f"output_{form}") for form in forms]
        columns, epsilon = k.scalar("columns"), k.scalar("epsilon", "f32")
        groups = bind(tirx.floordiv(columns, i64(group_size)))
        convolution = _Convolution(traits, taps, group_size, 1, z, base, columns)
        with k.units() as row:
            start = bind(row * columns)
            with T.serial(i64(0), groups) as group:
                own = [bind(load(dynamic, (row * taps + tap) * groups + group)) for tap in range(taps)]
                with convolution.vectors(row, group * group_size, own) as (channel, value, width):
                    store(total, start + channel, load(x, start + channel, width) + value, width)
            if weight is not None and scratch is not None:
                emit_norm(traits, total, weight, scratch, forms, outputs, start, columns, epsilon)
    return k.kernel
