"""Small kernels that between them use all that a code generator must know; builders as rules name them."""

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import (
    Kernel,
    KernelBuilder,
    barrier,
    bind,
    cast,
    const,
    f32,
    fma,
    i32,
    load,
    load4,
    local,
    reinterpret,
    select,
    store,
)
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.requests import KernelRequest

THREADS = 64


def scale(traits: Traits) -> Kernel:
    """y[i] = x[i] * factor for i < count."""
    k = KernelBuilder("scale", traits)
    arguments = [("x", "float32"), ("count", "i32"), ("y", "float32"), ("factor", "f32")]
    with k.build(arguments) as (x, count, y, factor), k.workgroups(THREADS) as (group, thread):
        i = bind(group * THREADS + thread)
        with T.If(i < count), T.Then():
            store(y, i, load(x, i) * factor)
    return k.kernel


def block_sum(traits: Traits) -> Kernel:
    """y[g] = the sum of x[g * 64 ...], by a tree in workgroup memory."""
    k = KernelBuilder("block_sum", traits)
    with k.build([("x", "float32"), ("y", "float32")]) as (x, y), k.workgroups(THREADS) as (group, thread):
        sums = k.shared(THREADS, "float32")
        store(sums, thread, load(x, group * THREADS + thread))
        barrier()
        width = THREADS // 2
        while width:
            with T.If(thread < width), T.Then():
                store(sums, thread, load(sums, thread) + load(sums, thread + width))
            barrier()
            width //= 2
        with T.If(thread == 0), T.Then():
            store(y, group, load(sums, 0))
    return k.kernel


def dot_rows(traits: Traits) -> Kernel:
    """y[i] = the dot product of 16 signed bytes x[i] and w[i], read as vectors of four words."""
    k = KernelBuilder("dot_rows", traits)
    arguments = [("x", "int32"), ("w", "int32"), ("y", "int32")]
    with k.build(arguments) as (x, w, y), k.workgroups(THREADS) as (group, thread):
        i = bind(group * THREADS + thread)
        total = i32(0)
        for a, b in zip(load4(x, i), load4(w, i), strict=True):
            total = traits.dot4(a, b, total)
        store(y, i, total)
    return k.kernel


def halves(traits: Traits) -> Kernel:
    """y[i] = float16(x[i]), z[i] = float32(y[i] as stored) and w[i] = the same from the bits."""
    k = KernelBuilder("halves", traits)
    arguments = [("x", "float32"), ("y", "float16"), ("bits", "uint16"), ("z", "float32"), ("w", "float32")]
    with k.build(arguments) as (x, y, bits, z, w), k.workgroups(THREADS) as (group, thread):
        i = bind(group * THREADS + thread)
        store(y, i, cast("float16", load(x, i)))
        store(z, i, cast("float32", cast("float16", load(x, i))))
        store(w, i, traits.half_to_float(cast("uint32", load(bits, i))))
    return k.kernel


def wide(traits: Traits) -> Kernel:
    """y[i] = low half of seed[i] * odd ^ seed[i] >> 29, z[i] = x[i] / 3 + i, s[i] = -2**40 * i."""
    k = KernelBuilder("wide", traits)
    arguments = [("seed", "uint64"), ("y", "uint64"), ("x", "float64"), ("z", "float64"), ("s", "int64")]
    with k.build(arguments) as (seed, y, x, z, s), k.workgroups(THREADS) as (group, thread):
        i = bind(group * THREADS + thread)
        word = bind(load(seed, i))
        low = tirx.bitwise_and(word, const(0xFFFFFFFF, "uint64"))  # sums and products of integers must not overflow
        store(y, i, low * const(0x9E3779B9, "uint64") ^ tirx.shift_right(word, const(29, "uint64")))
        store(z, i, load(x, i) * const(1 / 3, "float64") + cast("float64", i))
        store(s, i, const(-(1 << 40), "int64") * cast("int64", i))
    return k.kernel


def small_integers(traits: Traits) -> Kernel:
    """Bytes in, bytes out: floored division of signed bytes by -7 and 8, truncated by -3, and the sign of the words."""
    k = KernelBuilder("small_integers", traits)
    outputs = [("floored", "int8"), ("remainder", "int8"), ("eighth", "int8"), ("low", "int8"), ("truncated", "int16"),
               ("top", "uint8")]
    with k.build([("x", "int8"), *outputs]) as (x, *buffers), k.workgroups(THREADS) as (group, thread):
        i = bind(group * THREADS + thread)
        value = bind(cast("int32", load(x, i)))
        values = [tirx.floordiv(value, i32(-7)), tirx.floormod(value, i32(-7)), tirx.floordiv(value, i32(8)),
                  tirx.floormod(value, i32(8)), tirx.truncdiv(value, i32(-3)),
                  reinterpret("uint32", value) >> const(24, "uint32")]
        for (_, kind), buffer, result in zip(outputs, buffers, values, strict=True):
            store(buffer, i, cast(kind, result))
    return k.kernel


def control(traits: Traits) -> Kernel:
    """Collatz steps of x[i] by `while`; s[i] = the sum of 2 to x[i], a loop that ends as memory says; names of GLSL."""
    k = KernelBuilder("control", traits)
    arguments = [("input", "int32"), ("output", "int32"), ("sample", "int32"), ("float", "i32")]
    with k.build(arguments) as (x, y, s, most), k.workgroups(THREADS) as (group, thread):
        i = bind(group * THREADS + thread)
        value, steps = local(1, "int32"), local(1, "int32")
        store(value, 0, load(x, i))
        store(steps, 0, i32(0))
        with T.While(tirx.all(load(value, 0) > 1, load(steps, 0) < most)):
            store(value, 0, select(tirx.bitwise_and(load(value, 0), i32(1)) == 0,
                                   tirx.truncdiv(load(value, 0), i32(2)), load(value, 0) * 3 + 1))
            store(steps, 0, load(steps, 0) + 1)
        store(y, i, load(steps, 0))
        total = local(1, "int32")
        store(total, 0, i32(0))
        with T.serial(i32(2), load(x, i)) as j:
            store(total, 0, load(total, 0) + j)
        store(s, i, load(total, 0))
    return k.kernel


def floats(traits: Traits) -> Kernel:
    """Values that a compiler may be tempted to change: contraction, infinities, NaN, odd constants, bits."""
    k = KernelBuilder("floats", traits)
    arguments = [("a", "float32"), ("b", "float32"), ("c", "float32"), ("y", "float32")]
    with k.build(arguments) as (a, b, c, y), k.workgroups(THREADS) as (group, thread):
        i = bind(group * THREADS + thread)
        p, q, r = bind(load(a, i)), bind(load(b, i)), bind(load(c, i))
        values = [p * q + r, fma(p, q, r), (p * f32(0.1)) * f32(1e-30), p - p, select(p < q, p, f32(-np.inf)),
                  cast("float32", select(p != p, i32(1), i32(0))), reinterpret("float32", i32(0x7F800000)),
                  tirx.nearbyint(p), tirx.abs(p), tirx.floor(p), tirx.max(q, r), tirx.sqrt(tirx.abs(q))]
        for index, value in enumerate(values):
            store(y, i * len(values) + index, value)
    return k.kernel


def exchange(traits: Traits) -> Kernel:
    """y[i] = i + seed, then after a barrier x[i] = y of the mirror thread of the workgroup: through global memory."""
    k = KernelBuilder("exchange", traits)
    arguments = [("x", "int32"), ("y", "int32"), ("seed", "i32")]
    with k.build(arguments) as (x, y, seed), k.workgroups(THREADS) as (group, thread):
        first = bind(group * THREADS)
        store(y, first + thread, first + thread + seed)
        barrier()
        store(x, first + thread, load(y, first + (THREADS - 1) - thread))
    return k.kernel


def names(traits: Traits) -> Kernel:
    """y[i] after 40 steps of v -> v / 2 + i where v > i, else 2 v + 1, each a name that stands for the one before."""
    k = KernelBuilder("names", traits)
    with k.build([("y", "int32")]) as (y,), k.workgroups(THREADS) as (group, thread):
        value = bind(group * THREADS + thread)
        for _ in range(40):
            value = bind(select(value > thread, tirx.truncdiv(value, i32(2)) + thread, value * 2 + 1))
        store(y, group * THREADS + thread, value)
    return k.kernel


ALL = (scale, block_sum, dot_rows, halves, wide, small_integers, control, floats, exchange, names)
REQUESTS = [KernelRequest(builder.__name__, builder, ()) for builder in ALL]
