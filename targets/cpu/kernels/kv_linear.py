"""K and V of the drafter's layers from the context features: matmul, head norm, rope and cache write in one launch.

A row's K and V equal those of `matmul` and `kv_write` to the last bit. Knows nothing of taps or fusion.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, i64, load, local, store
from dflashc.targets.cpu.kernels.activation import declare_form
from dflashc.targets.cpu.kernels.attention_head import HeadNorm, Rotation, emit_head
from dflashc.targets.cpu.kernels.kv_cache import KvCache, kv_type
from dflashc.targets.cpu.kernels.row_groups import row_group_products
from dflashc.targets.cpu.kernels.tiles import row_chunks, row_tiles, rows_name
from dflashc.targets.cpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS

HEAD_UNIT = 16
"""What the size of a head must be a multiple of: norms and biases of the layers then lie without gaps."""


def kv_linear(traits: Traits, format_name: str, rows: int | None, size: int, pairing: str, epilogue: str,
              kv: str) -> Kernel:
    """K = rope(rms_norm(x . Wk (+ bk))) and V = x . Wv (+ bv) into the caches of several layers. Unit = one head of one
    matrix.

    The matrices (kv_heads * D, K) of a launch are consecutive ones of layer 0's K, layer 0's V, layer 1's K, … and lie
    packed one behind the other; unit = matrix * kv_heads + head, matrix counted from the launch's first.

    Parameters
    ----------
    rows : int or None
        Activation rows, at most 16; None for a runtime number, a multiple of 16.
    size : int
        D, a multiple of `HEAD_UNIT`.
    pairing : str
        "neox" or "norm", see `Rotation`.
    epilogue : str
        "store" or "store_bias".
    kv : str
        Type of the caches, see `kv_cache`.

    Notes
    -----
    Arguments: the activation's buffers, weight uint8 (the first matrix), [biases float32 (2 * layers, kv_heads * D),]
    k_norms float32 (layers, D), state int64 (row m has position state[0] + m), cosine and sine float32 (M, pairs),
    keys, values (the caches of the layers, one behind the other); then the scalars [rows,] columns (K), kv_heads,
    capacity (of each cache, in tokens), pairs, first_matrix (index of the launch's first matrix), epsilon (f32).
    """
    layout = PACKED_FORMATS[format_name]
    groups = size // traits.lanes
    storage = kv_type(kv, traits, size)
    k = KernelBuilder(f"kv_linear_{format_name}_{rows_name(rows)}_d{size}_{pairing}_{epilogue}_{kv}", traits)
    with k.build():
        activations = declare_form(k, layout.form, "input")
        weight = k.buffer("weight", "uint8")
        biases = k.buffer("biases", "float32") if epilogue == "store_bias" else None
        k_norms = k.buffer("k_norms", "float32")
        state, cosine, sine = k.buffer("state", "int64"), k.buffer("cosine", "float32"), k.buffer("sine", "float32")
        keys, values = k.buffer("keys", storage.dtype), k.buffer("values", storage.dtype)
        count = k.scalar("rows") if rows is None else rows
        columns, kv_heads, capacity = k.scalar("columns"), k.scalar("kv_heads"), k.scalar("capacity")
        rotation = Rotation(pairing, cosine, sine, k.scalar("pairs"))
        first_matrix, epsilon = k.scalar("first_matrix"), k.scalar("epsilon", "f32")
        cache = KvCache(storage, keys, values, capacity)
        with k.units() as unit:
            head = bind(tirx.truncmod(unit, kv_heads))
            matrix = bind(first_matrix + tirx.truncdiv(unit, kv_heads))
            layer = bind(tirx.truncdiv(matrix, i64(2)))
            is_key = bind(tirx.truncmod(matrix, i64(2)) == i64(0))
            first_output = bind((matrix * kv_heads + head) * i64(size))
            norm = HeadNorm(_copy(traits, k_norms, bind(layer * size), size), epsilon)
            with row_chunks(count) as (first_row, chunk):
                outputs = local(chunk * size, "float32")
                with T.serial(i64(0), i64(groups)) as g, row_tiles(traits, first_row, chunk) as tile:
                    group = bind(unit * i64(groups) + g)
                    products = row_group_products(traits, layout, weight, group, activations, tile, columns)
                    added = None if biases is None else bind(
                        load(biases, first_output + g * i64(traits.lanes), traits.lanes))
                    for row, product in zip(tile.rows, products, strict=True):
                        output = product if added is None else product + added
                        store(outputs, (row - first_row) * i64(size) + g * i64(traits.lanes), output, traits.lanes)
                with T.serial(i64(0), i64(chunk)) as m:
                    row, offset = bind(first_row + m), bind(m * i64(size))
                    at = cache.place(bind(layer * kv_heads + head), bind(load(state, 0) + row))
                    with T.If(is_key):
                        with T.Then():
                            key = local(size, "float32")
                            emit_head(traits, size, outputs, offset, row, rotation, norm, None, key, i64(0))
                            storage.write_key(key, keys, at)
                        with T.Else():
                            storage.write_value(outputs, offset, values, at)
    return k.kernel


def _copy(traits: Traits, source: Expr, offset: Expr, size: int) -> Expr:
    """source[offset:][:size] as a buffer of its own."""
    target = local(size, "float32")
    with T.serial(i64(0), i64(size // traits.lanes)) as i:
        store(target, i * traits.lanes, load(source, offset + i * traits.lanes, traits.lanes), traits.lanes)
    return target
