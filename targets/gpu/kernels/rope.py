"""Rotary position embedding: the cosines and sines of a program's rows.

Owns the reduction of angles. Knows nothing of how the pairs of a head are chosen (attention does).
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Kernel,
    KernelBuilder,
    bind,
    cast,
    const,
    f32,
    i32,
    load,
    select,
    state_word,
    store,
)
from dflashc.targets.gpu.kernels.elementary import cosine_sine
from dflashc.targets.gpu.traits import Traits

THREADS = 64


def rope_table(traits: Traits) -> Kernel:
    """Cosine and sine of every rotary pair at each row's position. A thread = one pair of one row.

    angle(row, i) = (n + row) * frequency[i], below 2^20. It is reduced to a quarter turn in float64, where it has 30
    bits to spare, and goes on in float32: absolute error below 1.5e-7 * magnitude.

    Arguments
    ---------
    state : state block; word 0 is n, the position of row 0
    frequency : float64 (pairs,)
    table : float32 (2, rows, pairs), written: cosines, then sines
    rows, pairs : i32; pairs is half the number of rotated dimensions
    magnitude : f32; factor on both (YaRN's attention factor; 1 otherwise)
    """
    k = KernelBuilder("rope_table", traits)
    arguments = [("state", "int32"), ("frequency", "float64"), ("table", "float32"), ("rows", "i32"), ("pairs", "i32"),
                 ("magnitude", "f32")]
    with k.build(arguments) as (state, frequency, table, rows, pairs, magnitude), k.workgroups(THREADS) as indices:
        group, thread = indices
        entry = bind(group * THREADS + thread)
        with T.If(entry < rows * pairs), T.Then():
            row, pair = bind(tirx.truncdiv(entry, pairs)), bind(tirx.truncmod(entry, pairs))
            position = cast("float64", state_word(state, 0) + row)
            quarters = bind(position * load(frequency, pair) * const(2 / math.pi, "float64"))
            turns = bind(cast("int32", quarters + const(0.5, "float64")))
            rest = bind(quarters - cast("float64", turns))
            c, s = cosine_sine(bind(cast("float32", rest * const(math.pi / 2, "float64"))))
            odd = bind((turns & i32(1)) == i32(1))
            cosine, sine = bind(select(odd, s, c)), bind(select(odd, c, s))
            # quarter turns 1 and 2 have a negative cosine, 2 and 3 a negative sine
            store(table, entry, select(((turns + 1) & i32(2)) == i32(0), cosine, f32(0) - cosine) * magnitude)
            store(table, rows * pairs + entry, select((turns & i32(2)) == i32(0), sine, f32(0) - sine) * magnitude)
    return k.kernel


def rope_groups(rows: int, pairs: int) -> int:
    """Workgroups of `rope_table`."""
    return math.ceil(rows * pairs / THREADS)
