"""K and V of the drafter's layers from the context features: matmul, head norm, rope and cache write in one launch.

Knows nothing of taps or fusion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    state_word,
    store,
)
from dflashc.targets.gpu.kernels.attention_head import LANES, HeadNorm, Rotation, head_vector
from dflashc.targets.gpu.kernels.codes import PackedRow
from dflashc.targets.gpu.kernels.kv_cache import kv_type
from dflashc.targets.gpu.kernels.kv_type import Place
from dflashc.targets.gpu.kernels.row_groups import ROWS, THREADS, Products, activation_arguments, packed_row
from dflashc.targets.gpu.kernels.shares import Share, declare_products, emit_products, split
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS

MOST_SIZE = 256
"""The largest head: with 16 rows, products and heads fill 32 KiB of workgroup memory."""

MOST_MEMBERS = 31
"""Matrices among which a launch can take some: bits of `members` that leave it positive."""


def kv_injection(traits: Traits, format_name: str, share: Share, size: int, pairing: str, epilogue: str,
                 kv: str) -> Kernel:
    """K = rope(rms_norm(x . Wk (+ bk))) and V = x . Wv (+ bv) into the caches of several layers.

    Matrices (kv_heads * D, K) are numbered layer 0's K, layer 0's V, layer 1's K, …. Those of a launch have one block
    format and lie packed one behind the other. Workgroup = (matrix * kv_heads + head) * passes + pass, where a pass
    is `share.rows` activation rows.

    Parameters
    ----------
    share : Share
        Of a step through the head: at most 16 activation rows, of which the launch has a multiple; 32 weight rows.
    size : int
        D, a multiple of 16 up to 256.
    pairing : str
        "neox" or "norm", see `Rotation`.
    epilogue : str
        "store" or "store_bias".
    kv : str
        Type of the caches.

    Notes
    -----
    Arguments: the activation's buffers, weight (the first matrix), [biases float32 (2 * layers, kv_heads * D),] k_norms
    float32 (layers, D), state block (row m has position word 0 + m), table float32 (2, total_rows, pairs), keys and
    values of that type, of all layers one behind the other; then the scalars columns (K), kv_heads, first_matrix,
    members (bit i: matrix first_matrix + i is one of the launch; 0: they are consecutive ones from the first on),
    capacity, total_rows (of the launch), pairs, epsilon (f32).
    """
    layout = PACKED_FORMATS[format_name]
    rows = share.rows
    k = KernelBuilder("kv_injection", traits)
    storage = kv_type(kv, traits, size)
    inputs = activation_arguments(format_name)
    arguments = [*inputs, ("weight", "uint32"), *([("biases", "float32")] if epilogue == "store_bias" else []),
                 ("k_norms", "float32"), ("state", "int32"), ("table", "float32"), ("keys", "uint32"),
                 ("values", "uint32"),
                 *((n, "i32") for n in ("columns", "kv_heads", "first_matrix", "members", "capacity", "total_rows",
                                        "pairs")), ("epsilon", "f32")]
    with k.build(arguments) as operands:
        activations, (weight, *biases, k_norms, state, table, keys, values) = (operands[: len(inputs)],
                                                                               operands[len(inputs) : -8])
        columns, kv_heads, first_matrix, members, capacity, total_rows, pairs, epsilon = operands[-8:]
        with k.workgroups(THREADS) as (group, thread):
            member, first_row = split(group, bind(tirx.truncdiv(total_rows, i32(rows))), rows)
            head = bind(tirx.truncmod(member, kv_heads))
            number = bind(first_matrix + _offset(members, bind(tirx.truncdiv(member, kv_heads))))
            layer = bind(tirx.shift_right(number, i32(1)))

            products, outputs = declare_products(k, layout, share), k.shared(rows * size, "float32")
            with T.serial(i32(0), i32(math.ceil(size / ROWS))) as step:
                column = bind(step * ROWS)

                def weight_row(place: Expr, column: Expr = column) -> PackedRow:
                    at = bind(member * size + tirx.min(column + place, i32(size - 1)))
                    return packed_row(traits, layout, weight, at, columns)

                emit_products(traits, layout, share, weight_row, thread, activations, first_row, products)
                _collect(products, thread, outputs, column, size, biases, bind((number * kv_heads + head) * size))
                barrier()

            vector = bind(tirx.min(tirx.truncdiv(thread, i32(LANES)), i32(rows - 1)))
            exists = bind(tirx.truncdiv(thread, i32(LANES)) < rows)
            row, start = bind(first_row + vector), bind(vector * size)
            place = Place.of(bind(layer * kv_heads + head), bind(state_word(state, 0) + row), capacity)
            with T.If((number & i32(1)) == 0):
                with T.Then():
                    norm = HeadNorm(k_norms, epsilon, bind(layer * size))
                    key = head_vector(size, products.sums, thread, outputs, start, row,
                                      Rotation(pairing, table, total_rows, pairs), norm, f32(1))
                    storage.store_key(keys, place, key.element, thread, exists, products.sums)
                with T.Else():
                    storage.store_value(values, place, lambda d: bind(load(outputs, start + d)), thread, exists,
                                        products.sums)
    return k.kernel


def _offset(members: Expr, index: Expr) -> Expr:
    """How far behind the first the launch's matrix `index` is: where `members` has its set bit number `index`."""
    result, left = local(1, "int32"), local(1, "int32")
    store(result, 0, index)
    store(left, 0, index)
    with T.If(members != 0), T.Then(), T.serial(i32(0), i32(MOST_MEMBERS)) as bit, \
            T.If((tirx.shift_right(members, bit) & i32(1)) == 1), T.Then():
        with T.If(load(left, 0) == 0), T.Then():
            store(result, 0, bit)
        store(left, 0, load(left, 0) - 1)
    return bind(load(result, 0))


def _collect(products: Products, thread: Expr, outputs: Expr, column: Expr, size: int, biases: Sequence[Expr],
             first_bias: Expr) -> None:
    """The products, with their biases if any, as columns of `outputs` (rows, D) from `column` on, those that exist."""
    for turn in range(math.ceil(products.entries() / THREADS)):
        entry = bind(thread + turn * THREADS)
        at = bind(tirx.truncmod(entry, i32(ROWS)) + column)
        with T.If(tirx.all(entry < products.entries(), at < size)), T.Then():
            output = products.total(entry)
            for bias in biases:
                output = bind(output + load(bias, first_bias + at))
            store(outputs, tirx.truncdiv(entry, i32(ROWS)) * size + at, output)
