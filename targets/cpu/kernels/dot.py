"""Dot products of unsigned weight codes with signed 8-bit activations, four at a time in each 32-bit lane.

All levels compute the same exact integers. Knows the weight codes' largest value, but not their formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx

from dflashc.targets.cpu.builder import Expr, bind, cast, const, i64, load, reinterpret
from dflashc.targets.cpu.traits import Traits, broadcast, intrinsic

_INT16_MAX, _INT8_MAX = 32767, 127


def block_dots(traits: Traits, quads: Iterable[Expr], limit: int, codes: Expr, starts: Sequence[Expr],
               scale: Expr | None = None) -> list[Expr]:
    """Dot products of L weight rows with several activation rows.

    Parameters
    ----------
    quads : iterable of uint8 vectors (4 L)
        The weights' consecutive quads; taken one by one, so a generator keeps few registers busy.
    limit : int
        No weight code is above it.
    codes : buffer of int8
    starts : sequence of int64
        For each activation row the index of the code that meets the first weight.
    scale : int32 vector, optional
        |scale| <= 128, multiplied into the result.

    Returns
    -------
    list of int32 vectors
        One per activation row; exact.
    """
    if traits.dot == "maddubs":
        return _pairwise_dots(traits, quads, limit, codes, starts, scale)
    quad_dot = _portable_quad_dot if traits.dot == "none" else _vnni_quad_dot
    sums: list[Expr] = [const(0, traits.i32)] * len(starts)
    for index, weights in enumerate(quads):
        for m, start in enumerate(starts):
            sums[m] = bind(quad_dot(traits, sums[m], weights, codes, start + i64(4 * index)))
    return sums if scale is None else [bind(s * scale) for s in sums]


def _broadcast_quad(traits: Traits, codes: Expr, start: Expr) -> Expr:
    """Four activation codes, repeated in every lane; one broadcast from memory."""
    word = reinterpret("int32", load(codes, start, 4))
    return reinterpret(f"int8x{4 * traits.lanes}", broadcast(word, traits.lanes))


def _vnni_quad_dot(traits: Traits, total: Expr, weights: Expr, codes: Expr, start: Expr) -> Expr:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * traits.lanes}"  # also the name of AVX-VNNI's instruction
    return intrinsic(traits.i32, name, total, weights, _broadcast_quad(traits, codes, start))


def _portable_quad_dot(traits: Traits, total: Expr, weights: Expr, codes: Expr, start: Expr) -> Expr:
    lanes = reinterpret(traits.i32, weights)
    for byte in range(4):
        code = tirx.shift_right(lanes, const(8 * byte, traits.i32)) & const(255, traits.i32)
        activation = broadcast(cast("int32", load(codes, start + i64(byte))), traits.lanes)
        total = total + code * activation
    return total


def _pairwise_dots(traits: Traits, quads: Iterable[Expr], limit: int, codes: Expr, starts: Sequence[Expr],
                   scale: Expr | None) -> list[Expr]:
    """AVX2: sums of pairs in int16, for as long as they cannot overflow; then the scale, while widening to int32.

    8-bit codes overflow at once, so their nibbles are summed apart; the high nibbles' sum gets 16 times the scale.
    """
    pair = f"int16x{2 * traits.lanes}"
    if scale is None:
        factor = const(1, pair)
    else:
        low = scale & const(0xFFFF, traits.i32)
        factor = bind(reinterpret(pair, low | tirx.shift_left(scale, const(16, traits.i32))))
    split = limit > _INT16_MAX // (2 * _INT8_MAX)
    parts = 2 if split else 1
    capacity = _INT16_MAX // (2 * _INT8_MAX * (15 if split else limit))
    factors = [factor, bind(factor * const(16, pair))] if split else [factor]
    sums: list[Expr | None] = [None] * len(starts)
    pending: list[list[Expr | None]] = [[None] * parts for _ in starts]

    def flush() -> None:
        for m, sixteens in enumerate(pending):
            for part, value in enumerate(sixteens):
                if value is not None:
                    wide = multiply_pairs(traits, value, factors[part])
                    sums[m] = bind(wide if sums[m] is None else sums[m] + wide)
            pending[m] = [None] * parts

    for index, weights in enumerate(quads):
        if index and index % capacity == 0:
            flush()
        nibble = const(15, f"uint8x{4 * traits.lanes}")
        halves = [bind(weights & nibble), bind(_shift_bytes_right(traits, weights, 4) & nibble)] if split else [weights]
        for m, start in enumerate(starts):
            activation = bind(_broadcast_quad(traits, codes, start + i64(4 * index)))
            for part, half in enumerate(halves):
                product = intrinsic(pair, "llvm.x86.avx2.pmadd.ub.sw", half, activation)
                before = pending[m][part]
                pending[m][part] = bind(product if before is None else before + product)
    flush()
    return [s for s in sums if s is not None]


def _shift_bytes_right(traits: Traits, vector: Expr, bits: int) -> Expr:
    """Shift 32-bit lanes: bits of the neighbour byte come in, to be masked off."""
    shifted = tirx.shift_right(reinterpret(f"uint32x{traits.lanes}", vector), const(bits, f"uint32x{traits.lanes}"))
    return reinterpret(f"uint8x{4 * traits.lanes}", shifted)


def multiply_pairs(traits: Traits, a: Expr, b: Expr) -> Expr:
    """Products of int16 lanes, added in pairs to int32 lanes."""
    if traits.dot == "none":
        x, y = reinterpret(traits.i32, a), reinterpret(traits.i32, b)
        sixteen = const(16, traits.i32)

        def low(v: Expr) -> Expr:
            return tirx.shift_right(tirx.shift_left(v, sixteen), sixteen)

        return low(x) * low(y) + tirx.shift_right(x, sixteen) * tirx.shift_right(y, sixteen)
    name = "llvm.x86.avx512.pmaddw.d.512" if traits.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    return intrinsic(traits.i32, name, a, b)


def add_pair_products(traits: Traits, total: Expr, a: Expr, b: Expr) -> Expr:
    """total + `multiply_pairs(a, b)`."""
    if traits.dot in ("vnni512", "vnni256"):
        return intrinsic(traits.i32, f"llvm.x86.avx512.vpdpwssd.{32 * traits.lanes}", total, a, b)
    return total + multiply_pairs(traits, a, b)
