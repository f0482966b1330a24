"""Attention over K/V caches: decode and verify in one launch and a merge, prefill in two launches.

Keys are taken in parts of 256, each computed on its own and merged in the order of positions, whatever the number of
rows; so decode, verify and prefill agree to the last bit. Knows nothing of models or plans.

Common to all kernels: row i of a program has position n + i, n = state[0]. Matrix qkv has a row per token with columns
q (query_heads * D) | k (kv_heads * D) | v (kv_heads * D). query_heads = G * kv_heads; query head h * G + g reads KV
head h. `window` is the number of keys a row sees, itself the last of them; 0 is no limit. `kv` is the type of the
caches, `capacity` what they hold in tokens, see `kv_cache`: n + rows at least or, with a window, window - 1 + rows, so
that row 0 finds its window when the last row is stored. `denominator` is "keys", or "sinks" where each query head has
one more logit, without a value, in the denominator of its softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, cast, i64, load, local, store
from dflashc.targets.cpu.kernels.activation import FORMS, declare_form, emit_quantise
from dflashc.targets.cpu.kernels.attention_head import HeadNorm, Rotation, emit_head
from dflashc.targets.cpu.kernels.attention_tile import PART, Merged, Softmax
from dflashc.targets.cpu.kernels.kv_cache import KvCache, kv_type
from dflashc.targets.cpu.kernels.kv_tile import TILE, KvType, Tile, emit_prefetch
from dflashc.targets.cpu.traits import Traits, broadcast

BLOCK = 16
"""Rows of a unit of the prefill kernels."""


def window_parts(window: int, rows: int) -> int:
    """Parts of 256 keys that the windows of `rows` consecutive rows can reach into."""
    return math.ceil((window + rows - 2) / PART) + 1


def heads_per_unit(size: int, form: str) -> int:
    """Query heads that one unit of `attention_merge` takes: the fewest that fill whole groups of the form."""
    return math.lcm(size, FORMS[form].group) // size


@dataclass(frozen=True)
class _Reach:
    """Which keys a row sees: from `first(position)` up to its own position, or to `last` where that is given."""

    window: Expr
    last: Expr | None = None

    def first(self, position: Expr) -> Expr:
        limited = tirx.max(position - self.window + 1, i64(0))
        return tirx.Select(self.window > 0, limited, i64(0))

    def within(self, position: Expr, start: Expr) -> tuple[Expr, Expr]:
        """First and last key, int32, counted from key `start`."""
        last = position if self.last is None else self.last
        return cast("int32", self.first(position) - start), cast("int32", last - start)


@dataclass(frozen=True)
class _Projections:
    """Matrix qkv and what its heads go through."""

    traits: Traits
    size: int
    qkv: Expr
    leading: Expr
    query_heads: Expr
    kv_heads: Expr
    rotation: Rotation

    def query(self, row: Expr, head: Expr, norm: HeadNorm | None, scale: Expr, target: Expr, offset: Expr) -> None:
        start = bind(row * self.leading + head * self.size)
        emit_head(self.traits, self.size, self.qkv, start, row, self.rotation, norm, scale, target, offset)

    def write_key_value(self, row: Expr, head: Expr, norm: HeadNorm | None, cache: KvCache, position: Expr) -> None:
        """Key and value of a row and KV head into the cache."""
        start = bind(row * self.leading + (self.query_heads + head) * self.size)
        key = local(self.size, "float32")
        emit_head(self.traits, self.size, self.qkv, start, row, self.rotation, norm, None, key, i64(0))
        at = cache.place(head, position)
        cache.kv.write_key(key, cache.keys, at)
        cache.kv.write_value(self.qkv, bind(start + self.kv_heads * self.size), cache.values, at)


def _symbol(name: str, *arguments: int | str, head_norm: bool) -> str:
    """A kernel's symbol."""
    return "_".join([name, *map(str, arguments), "norm" if head_norm else "plain"])


def _emit_prefetch_first(cache: KvCache, head: Expr, position: Expr) -> None:
    """Fetch the keys of the tile of `position`, while the queries are prepared."""
    start = cache.place(head, position).tile
    share = cache.kv.tile_elements // TILE
    with T.serial(0, TILE) as i:
        emit_prefetch(cache.keys, cache.kv.dtype, start + i * share, share)


def _emit_part(softmax: Softmax, group: int, rows: int, cache: KvCache, head: Expr, part: Expr, position: Expr,
               reach: _Reach) -> None:
    """One part of KV head `head` for `rows` rows from `position` on, `group` queries each: tiles that any row sees."""
    start = bind(part * PART)
    first = bind(tirx.truncdiv(tirx.max(reach.first(position) - start, i64(0)), TILE))
    last = bind(tirx.min(position + (rows - 1) - start, i64(PART - 1)))
    base, tile_elements = cache.place(head, start).tile, cache.kv.tile_elements
    softmax.reset()
    with T.serial(first, tirx.truncdiv(last, TILE) + 1) as index:
        key = bind(start + index * TILE)
        offset = bind(base + index * tile_elements)
        count = bind(tirx.min(last + 1 - index * TILE, i64(TILE)))
        following = bind(offset + tirx.Select((index + 1) * TILE <= last, i64(tile_elements), i64(0)))
        softmax.tile(Tile(cache.keys, cache.values, offset, count, following),
                     lambda row: reach.within(position + tirx.truncdiv(row, group), key))
    softmax.finish()


def attention(traits: Traits, rows: int, group: int, size: int, pairing: str, head_norm: bool, kv: str,
              mask: str = "causal") -> Kernel:
    """Write the rows' K and V to the cache and attend part by part: partial results for `attention_merge`.

    One unit = one part of 256 keys of one KV head, unit = part * kv_heads + head, parts counted from the first that row
    0 sees; units = kv_heads * ceil((n + rows) / 256), or with a window kv_heads * `window_parts`, so that the cost does
    not grow with the context. Compiled for rows (1..16), group = G, size = D, pairing, head_norm, kv and
    mask: "causal", or "block" where all rows see each other (a drafted block).

    Arguments
    ---------
    state : int64
    qkv : float32 (rows, leading)
    cosine, sine : float32 (rows, pairs), of rope_table
    q_norm, k_norm : float32 (D,); only with head_norm
    keys, values : caches, written for positions n .. n + rows - 1
    partial_values : float32 scratch [units][rows * G][D]
    partial_sums : float32 scratch [units][rows * G][2], (maximum, sum of exponentials)
    leading, kv_heads, capacity, window, pairs : i64
    scale : f32, factor of the scores
    epsilon : f32, of the head norms; only with head_norm
    """
    kernel = KernelBuilder(_symbol("attention", rows, group, size, pairing, kv, head_norm=head_norm), traits)
    queries = rows * group
    with kernel.build():
        storage = kv_type(kv, traits, size)
        state, qkv, tables, weights, caches = _inputs(kernel, ("q_norm", "k_norm") if head_norm else (), storage)
        partial_values = kernel.buffer("partial_values", "float32")
        partial_sums = kernel.buffer("partial_sums", "float32")
        leading, kv_heads, capacity, window, pairs = (
            kernel.scalar(name) for name in ("leading", "kv_heads", "capacity", "window", "pairs"))
        scale = kernel.scalar("scale", "f32")
        q_norm, k_norm = _norms(kernel, weights)
        position = bind(load(state, 0))
        reach = _Reach(window, position + (rows - 1) if mask == "block" else None)
        cache = KvCache(storage, *caches, capacity)
        projections = _Projections(traits, size, qkv, leading, kv_heads * group, kv_heads,
                                   Rotation(pairing, *tables, pairs))
        softmax = Softmax(storage, queries)
        query = softmax.products.query
        with kernel.units() as unit:
            first_part = tirx.truncdiv(reach.first(position), PART)
            part, head = bind(first_part + tirx.truncdiv(unit, kv_heads)), bind(tirx.truncmod(unit, kv_heads))
            start = bind(part * PART)
            with T.If(start < position + rows), T.Then():
                _emit_prefetch_first(cache, head, bind(tirx.max(start, reach.first(position))))
                with T.serial(tirx.max(start - position, i64(0)), tirx.min(start + PART - position, i64(rows))) as row:
                    projections.write_key_value(row, head, k_norm, cache, bind(position + row))
                with T.serial(0, rows) as row, T.serial(0, group) as g:
                    projections.query(row, head * group + g, q_norm, scale, query, (row * group + g) * size)
                softmax.products.take_queries()
                _emit_part(softmax, group, rows, cache, head, part, position, reach)
                with T.serial(0, queries) as row:
                    store(partial_sums, (unit * queries + row) * 2, load(softmax.maximum, row * traits.lanes))
                    store(partial_sums, (unit * queries + row) * 2 + 1, load(softmax.total, row * traits.lanes))
                with T.serial(0, queries * size // traits.lanes) as i:
                    at = i * traits.lanes
                    value = load(softmax.value, at, traits.lanes)
                    store(partial_values, unit * (queries * size) + at, value, traits.lanes)
    return kernel.kernel


def _inputs(kernel: KernelBuilder, norms: tuple[str, ...],
            kv: KvType) -> tuple[Expr, Expr, tuple[Expr, Expr], list[Expr], tuple[Expr, Expr]]:
    """The arguments that open every kernel: state, qkv, cosine and sine, weights of the head norms, both caches."""
    return (kernel.buffer("state", "int64"), kernel.buffer("qkv", "float32"),
            (kernel.buffer("cosine", "float32"), kernel.buffer("sine", "float32")),
            [kernel.buffer(name, "float32") for name in norms],
            (kernel.buffer("keys", kv.dtype), kernel.buffer("values", kv.dtype)))


def _norms(kernel: KernelBuilder, weights: list[Expr]) -> list[HeadNorm | None]:
    """The head norms of q and k, or of k alone, with their shared epsilon, the kernel's next argument; None without."""
    if not weights:
        return [None, None]
    epsilon = kernel.scalar("epsilon", "f32")
    return [HeadNorm(weight, epsilon) for weight in weights]


def attention_merge(traits: Traits, size: int, form: str, mask: str = "causal", denominator: str = "keys") -> Kernel:
    """Merge the parts of `attention` and store the heads' outputs in an activation form, (rows, query_heads * D).

    One unit = one row and heads_per_unit(D, form) query heads, of which query_heads must be a multiple;
    units = rows * query_heads / heads_per_unit. Compiled for size = D, form, mask and denominator.

    Arguments
    ---------
    state : int64
    partial_values, partial_sums : float32, of `attention`
    sinks : float32 (query_heads,); only of denominator "sinks"
    output_* : the form's buffers
    rows, kv_heads, group, window : i64; the values `attention` ran with
    """
    kernel = KernelBuilder(f"attention_merge_{size}_{form}", traits)
    heads, lanes = heads_per_unit(size, form), traits.lanes
    with kernel.build():
        state = kernel.buffer("state", "int64")
        partial_values = kernel.buffer("partial_values", "float32")
        partial_sums = kernel.buffer("partial_sums", "float32")
        sinks = kernel.buffer("sinks", "float32") if denominator == "sinks" else None
        outputs = declare_form(kernel, form, "output")
        rows, kv_heads, group, window = (kernel.scalar(name) for name in ("rows", "kv_heads", "group", "window"))
        merged, result = Merged(traits, 1, size), local(heads * size, "float32")
        zero = i64(0)
        with kernel.units() as unit:
            row_units = bind(tirx.truncdiv(kv_heads * group, i64(heads)))
            row, block = bind(tirx.truncdiv(unit, row_units)), bind(tirx.truncmod(unit, row_units))
            position = bind(load(state, 0) + row)
            reach = _Reach(window)
            first_part = bind(tirx.truncdiv(reach.first(position), PART))
            first_unit = bind(first_part - tirx.truncdiv(reach.first(load(state, 0)), PART))
            last = bind(position if mask == "causal" else load(state, 0) + rows - 1)
            with T.serial(0, heads) as i:
                head = bind(block * heads + i)
                kv_head, g = bind(tirx.truncdiv(head, group)), bind(tirx.truncmod(head, group))
                merged.reset()
                if sinks is not None:
                    merged.see_sink(zero, load(sinks, head))
                with T.serial(0, tirx.truncdiv(last, PART) + 1 - first_part) as part:
                    query = bind((((first_unit + part) * kv_heads + kv_head) * rows + row) * group + g)
                    merged.add(zero, bind(broadcast(load(partial_sums, query * 2), lanes)),
                               bind(broadcast(load(partial_sums, query * 2 + 1), lanes)),
                               lambda j: load(partial_values, query * size + j, lanes))
                merged.result(zero, lambda j, value: store(result, i * size + j, value, lanes))
            element = (row * (kv_heads * group) + block * heads) * size
            emit_quantise(traits, form, result, 0, heads * size, outputs, element)
    return kernel.kernel


def kv_write(traits: Traits, size: int, pairing: str, head_norm: bool, kv: str) -> Kernel:
    """Write the K and V of a prefill program's rows to the cache; the first launch, before `attention_prefill`.

    One unit = 16 rows of one KV head, unit = block * kv_heads + head; units = kv_heads * rows / 16. Compiled for
    size = D, pairing, head_norm and kv.

    Arguments
    ---------
    state, qkv, cosine, sine : as in `attention`
    k_norm : float32 (D,); only with head_norm
    keys, values : caches, written for positions n .. n + rows - 1
    leading, query_heads, kv_heads, capacity, pairs : i64
    epsilon : f32; only with head_norm
    """
    kernel = KernelBuilder(_symbol("kv_write", size, pairing, kv, head_norm=head_norm), traits)
    with kernel.build():
        storage = kv_type(kv, traits, size)
        state, qkv, tables, weights, caches = _inputs(kernel, ("k_norm",) if head_norm else (), storage)
        leading, query_heads, kv_heads, capacity, pairs = (
            kernel.scalar(name) for name in ("leading", "query_heads", "kv_heads", "capacity", "pairs"))
        norm = _norms(kernel, weights)[0]
        cache = KvCache(storage, *caches, capacity)
        projections = _Projections(traits, size, qkv, leading, query_heads, kv_heads,
                                   Rotation(pairing, *tables, pairs))
        with kernel.units() as unit:
            block, head = bind(tirx.truncdiv(unit, kv_heads)), bind(tirx.truncmod(unit, kv_heads))
            with T.serial(0, BLOCK) as i:
                row = bind(block * BLOCK + i)
                position = bind(load(state, 0) + row)
                projections.write_key_value(row, head, norm, cache, position)
    return kernel.kernel


def attention_prefill(traits: Traits, group: int, size: int, pairing: str, head_norm: bool, kv: str,
                      denominator: str = "keys") -> Kernel:
    """Attention of a prefill program's rows, whose K and V `kv_write` has stored; no merge follows.

    One unit = 16 rows of one KV head, unit = head * (rows / 16) + block, last rows first, for they see the most keys;
    units = kv_heads * rows / 16. Compiled for group = G, size = D, pairing, head_norm, kv, denominator.

    Arguments
    ---------
    state, qkv, cosine, sine : as in `attention`
    q_norm : float32 (D,); only with head_norm
    keys, values : caches
    sinks : float32 (query_heads,); only of denominator "sinks"
    output : float32 (rows, query_heads * D)
    rows, leading, kv_heads, capacity, window, pairs : i64; rows a multiple of 16
    scale : f32, factor of the scores
    epsilon : f32; only with head_norm
    """
    kernel = KernelBuilder(_symbol("attention_prefill", group, size, pairing, kv, head_norm=head_norm), traits)
    lanes, queries = traits.lanes, BLOCK * group
    with kernel.build():
        storage = kv_type(kv, traits, size)
        state, qkv, tables, weights, caches = _inputs(kernel, ("q_norm",) if head_norm else (), storage)
        sinks = kernel.buffer("sinks", "float32") if denominator == "sinks" else None
        output = kernel.buffer("output", "float32")
        rows, leading, kv_heads, capacity, window, pairs = (
            kernel.scalar(name) for name in ("rows", "leading", "kv_heads", "capacity", "window", "pairs"))
        scale = kernel.scalar("scale", "f32")
        norm = _norms(kernel, weights)[0]
        reach, cache = _Reach(window), KvCache(storage, *caches, capacity)
        projections = _Projections(traits, size, qkv, leading, kv_heads * group, kv_heads,
                                   Rotation(pairing, *tables, pairs))
        softmax, merged = Softmax(storage, queries), Merged(traits, queries, size)
        blocks = bind(tirx.truncdiv(rows, BLOCK))
        with kernel.units() as unit:
            head = bind(tirx.truncdiv(unit, blocks))
            first_row = bind((blocks - 1 - tirx.truncmod(unit, blocks)) * BLOCK)
            position = bind(load(state, 0) + first_row)
            with T.serial(0, BLOCK) as i, T.serial(0, group) as g:
                projections.query(bind(first_row + i), head * group + g, norm, scale, softmax.products.query,
                                  (i * group + g) * size)
            softmax.products.take_queries()
            merged.reset()
            if sinks is not None:
                with T.serial(0, queries) as query:
                    merged.see_sink(query, load(sinks, bind(head * group + tirx.truncmod(query, group))))
            first_part = tirx.truncdiv(reach.first(position), PART)
            with T.serial(first_part, tirx.truncdiv(position + (BLOCK - 1), PART) + 1) as part:
                _emit_part(softmax, group, BLOCK, cache, head, part, position, reach)
                with T.serial(0, queries) as query:
                    own = bind(position + tirx.truncdiv(query, group))
                    start = bind(part * PART)
                    with T.If(tirx.all(start <= own, start + PART > reach.first(own))), T.Then():
                        merged.add(query, bind(load(softmax.maximum, query * lanes, lanes)),
                                   bind(load(softmax.total, query * lanes, lanes)),
                                   lambda j: load(softmax.value, query * size + j, lanes))
            with T.serial(0, queries) as query:
                row, g = bind(tirx.truncdiv(query, group)), bind(tirx.truncmod(query, group))
                at = bind(((first_row + row) * (kv_heads * group) + head * group + g) * size)
                merged.result(query, lambda j, value: store(output, at + j, value, lanes))
    return kernel.kernel
