"""Attention over K/V caches: one kernel that stores K and V and attends slot by slot, and one that merges.

The context is cut into parts of 256 keys, which a fixed number P of slots share (`attention_reach`). A workgroup takes
8 queries of a KV head and one slot: it adds up the slot's parts in the order of their positions, and the merge adds up
the slots. The same compiled kernel serves every number of rows, so decode, verify and prefill agree to the last bit.
Knows nothing of models or plans.

Row i of a program has position n + i, n = state[0]. Matrix qkv has a row per token with columns q (query_heads * D) |
k (kv_heads * D) | v (kv_heads * D). query_heads = G * kv_heads; query head h * G + g reads KV head h. See `Reach` for
`window` and `block`. `capacity` is that of the caches in tokens, see `kv_type`: at least n + rows or, with a
window, what keeps the window of row 0 until the last row is stored, window - 1 + rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    select,
    state_word,
)
from dflashc.targets.gpu.kernels.attention_head import LANES, VECTORS, HeadNorm, HeadVector, Rotation, head_vector
from dflashc.targets.gpu.kernels.attention_part import THREADS, Keys, Softmax
from dflashc.targets.gpu.kernels.attention_reach import PART, Reach
from dflashc.targets.gpu.kernels.elementary import LOG2_E
from dflashc.targets.gpu.kernels.kv_cache import kv_type
from dflashc.targets.gpu.kernels.kv_type import QUERIES, KvType, Place
from dflashc.targets.gpu.traits import Traits

MOST_SIZE = 256
"""The largest head."""


def query_chunks(rows: int, group: int) -> int:
    """Chunks of 8 queries that `rows` rows make for a KV head."""
    return math.ceil(rows * group / QUERIES)


def store_chunks(rows: int) -> int:
    """Chunks of 16 rows whose K and V a launch that only stores takes one at a time."""
    return math.ceil(rows / VECTORS)


@dataclass(frozen=True)
class _Program:
    """What all parts of the kernel know: matrix qkv, the caches, and how heads get from one to the other."""

    kv: KvType
    size: int
    qkv: Expr
    keys: Expr
    values: Expr
    kv_heads: Expr
    group: Expr
    capacity: Expr
    rotation: Rotation
    scratch: Expr
    thread: Expr

    def vector(self, row: Expr, column: Expr, norm: HeadNorm | None, factor: Expr) -> HeadVector:
        """The head whose elements start at `column * D` of a row, of 16 that the workgroup prepares together."""
        start = bind(row * self.columns() + column * self.size)
        return head_vector(self.size, self.scratch, self.thread, self.qkv, start, row, self.rotation, norm, factor)

    def columns(self) -> Expr:
        return (self.group + 2) * self.kv_heads * self.size

    def store_key_value(self, head: Expr, row: Expr, wanted: Expr, norm: HeadNorm | None, position: Expr) -> None:
        """K and V of KV head `head` of 16 rows, `row` and `position` being this thread's."""
        column = bind(self.group * self.kv_heads + head)
        key = self.vector(row, column, norm, f32(1))
        value = bind(row * self.columns() + (column + self.kv_heads) * self.size)
        place = Place.of(head, position, self.capacity)
        self.kv.store_key(self.keys, place, key.element, self.thread, wanted, self.scratch)
        self.kv.store_value(self.values, place, lambda d: bind(load(self.qkv, value + d)), self.thread, wanted,
                            self.scratch)


def attention(traits: Traits, size: int, pairing: str, head_norm: bool, kv: str) -> Kernel:
    """Store K and V of rows in the caches, and attend: results of every slot for `attention_merge`.

    Workgroup = KV head, slot and chunk, the chunk varying fastest: kv_heads * P * chunks. Two kinds of launches:
     - attended > 0: rows first_row … first_row + attended - 1 attend, chunks = `query_chunks`. Each workgroup first
       stores those of the rows 0 … stored - 1 (16 at most) that its slot will read: several may store the same.
     - attended = 0: rows 0 … stored - 1 are stored, chunks = `store_chunks`.
    Compiled for size = D, pairing, head_norm and the caches' type.

    Arguments
    ---------
    state : state block
    qkv : float32 (rows, (query_heads + 2 * kv_heads) * D)
    table : float32 (2, rows, pairs), of rope_table
    q_norm, k_norm : float32 (D,); only with head_norm
    keys, values : caches, uint32
    partial_values : float32 scratch [P][attended][query_heads][D]
    partial_sums : float32 scratch [P][attended][query_heads][2], (maximum, sum of exponentials)
    rows, stored, first_row, attended, chunks, group, kv_heads, capacity, window, block, pairs : i32; `rows` of the
        program
    scale : f32, factor of the scores
    epsilon : f32, of the head norms; only with head_norm
    """
    k = KernelBuilder("_".join(["attention", str(size), pairing, "norm" if head_norm else "plain", kv]), traits)
    scalars = ("rows", "stored", "first_row", "attended", "chunks", "group", "kv_heads", "capacity", "window", "block",
               "pairs")
    arguments = [("state", "int32"), ("qkv", "float32"), ("table", "float32"),
                 *([("q_norm", "float32"), ("k_norm", "float32")] if head_norm else []), ("keys", "uint32"),
                 ("values", "uint32"), ("partial_values", "float32"), ("partial_sums", "float32"),
                 *((name, "i32") for name in scalars), ("scale", "f32"), *([("epsilon", "f32")] if head_norm else [])]
    with k.build(arguments) as values:
        a = dict(zip((name for name, _ in arguments), values, strict=True))
        q_norm, k_norm = (HeadNorm(a[name], a["epsilon"]) if head_norm else None for name in ("q_norm", "k_norm"))
        with k.workgroups(THREADS) as (workgroup, thread):
            chunk = bind(tirx.truncmod(workgroup, a["chunks"]))
            rest = bind(tirx.truncdiv(workgroup, a["chunks"]))
            own_slot = bind(tirx.truncmod(rest, i32(traits.attention_slots)))
            head = bind(tirx.truncdiv(rest, i32(traits.attention_slots)))
            position = state_word(a["state"], 0)
            reach = Reach(position, a["rows"], a["window"], a["block"], traits.attention_slots)
            scratch = k.shared(THREADS, "float32")
            storage = kv_type(kv, traits, size)
            softmax = Softmax(k, size, storage, thread)
            program = _Program(storage, size, a["qkv"], a["keys"], a["values"], a["kv_heads"], a["group"],
                               a["capacity"], Rotation(pairing, a["table"], a["rows"], a["pairs"]), scratch, thread)
            _emit_store(program, reach, head, own_slot,
                        bind(select(a["attended"] > i32(0), i32(0), chunk * VECTORS)), a["stored"], k_norm)
            _emit_attend(program, softmax, reach, head, own_slot, chunk, a, q_norm)
    return k.kernel


def _emit_store(program: _Program, reach: Reach, head: Expr, own_slot: Expr, first: Expr, stored: Expr,
                norm: HeadNorm | None) -> None:
    """Store those of the 16 rows from `first` on whose positions are in the slot."""
    row = bind(tirx.min(first + tirx.truncdiv(program.thread, i32(LANES)), stored - 1))
    end = bind(reach.position + tirx.min(first + VECTORS, stored))
    ahead = reach.ahead(own_slot, bind(reach.position + first))
    next_part = bind((tirx.truncdiv(reach.position + first, i32(PART)) + ahead) * PART)
    with T.If(tirx.all(first < stored, next_part < end)), T.Then():
        position = bind(reach.position + row)
        program.store_key_value(head, row, bind(reach.ahead(own_slot, position) == i32(0)), norm, position)
    barrier()


def _emit_attend(program: _Program, softmax: Softmax, reach: Reach, head: Expr, own_slot: Expr, chunk: Expr,
                 a: dict[str, Expr], norm: HeadNorm | None) -> None:
    """The 8 queries of a chunk over the parts of a slot."""
    group = program.group
    queries = bind(a["attended"] * group)
    first_query = bind(chunk * QUERIES)
    first_row = bind(a["first_row"] + tirx.truncdiv(first_query, group))
    last_row = bind(a["first_row"] + tirx.truncdiv(tirx.min(first_query + QUERIES, queries) - 1, group))
    begin, end = reach.first(first_row), bind(reach.last(last_row) + 1)
    first_part = bind(tirx.truncdiv(begin, i32(PART)) + reach.ahead(own_slot, begin))
    parts = bind(tirx.truncdiv(end + (PART - 1), i32(PART)) - first_part)  # of all slots, up to the last key
    turns = bind(select(a["attended"] > i32(0), tirx.truncdiv(
        tirx.max(parts, i32(0)) + (reach.slots - 1), i32(reach.slots)), i32(0)))

    def split(query: Expr) -> tuple[Expr, Expr, Expr]:
        """(whether it exists, its row, its head) of a query of the chunk."""
        number = bind(first_query + query)
        exists = bind(number < queries)
        number = bind(select(exists, number, i32(0)))
        return (exists, bind(a["first_row"] + tirx.truncdiv(number, group)),
                bind(head * group + tirx.truncmod(number, group)))

    with T.If(turns > i32(0)), T.Then():
        _emit_queries(program, softmax, split, norm, bind(a["scale"] * f32(LOG2_E)))
        exists, row, _ = split(softmax.query)
        first, last = reach.first(row), bind(select(exists, reach.last(row), i32(-1)))
        softmax.reset()
        with T.serial(i32(0), turns) as turn:
            start = bind((first_part + turn * reach.slots) * PART)
            part = Keys(bind(tirx.max(begin - start, i32(0))), bind(tirx.min(end - start, i32(PART))),
                        Place.of(head, start, program.capacity))
            softmax.add_part(program.keys, program.values, part, bind(first - start), bind(last - start))

        def place(query: Expr) -> Expr:
            exists, row, query_head = split(query)
            rows = own_slot * a["attended"] + row - a["first_row"]
            return select(exists, rows * (group * program.kv_heads) + query_head, i32(-1))

        softmax.finish(a["partial_sums"], a["partial_values"], place)


def _emit_queries(program: _Program, softmax: Softmax, split: Callable[[Expr], tuple[Expr, Expr, Expr]],
                  norm: HeadNorm | None, scale: Expr) -> None:
    """The queries of a chunk as the keys want them, zeros where there is none."""
    lane = bind(tirx.truncmod(program.thread, i32(LANES)))
    query = bind(tirx.truncdiv(program.thread, i32(LANES)))
    exists, row, head = split(query)
    vector = program.vector(row, head, norm, scale)
    with T.If(query < QUERIES), T.Then(), T.serial(i32(0), i32(program.size // LANES)) as turn:
        d = bind(turn * LANES + lane)
        program.kv.keep_query(query, d, select(exists, vector.element(d), f32(0)))
    program.kv.take_queries(program.thread)
