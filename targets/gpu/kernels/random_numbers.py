"""Random numbers that depend on their key and counter alone: Philox 4x64 with ten rounds (Salmon et al., 2011).

Gives, bit for bit, what `runtime.sampling.uniform` gives. Knows nothing of what is drawn.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Expr, bind, cast, const, i32, load, local, store

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10

# TVM marks unsigned additions and products as free of overflow, so words are put together from halves that have room.


def uniform(seed: Expr, purpose: int, position: Expr) -> Expr:
    """The number in [0, 1), float64, for the key (seed, purpose) and the counter (1, position, 0, 0).

    Parameters
    ----------
    seed : uint64
    position : int32
    """
    counter = [local(1, "uint64") for _ in range(4)]
    key = [local(1, "uint64") for _ in range(2)]
    for slot, word in zip(counter, (_u64(1), cast("uint64", position), _u64(0), _u64(0)), strict=True):
        store(slot, 0, word)
    for slot, word in zip(key, (seed, _u64(purpose)), strict=True):
        store(slot, 0, word)
    with T.serial(i32(0), i32(_ROUNDS)):
        (low, high), (other_low, other_high) = (
            _product(multiplier, bind(load(counter[place], 0)))
            for multiplier, place in zip(_MULTIPLIERS, (0, 2), strict=True))
        first = bind(other_high ^ load(counter[1], 0) ^ load(key[0], 0))
        third = bind(high ^ load(counter[3], 0) ^ load(key[1], 0))
        for slot, word in zip(counter, (first, other_low, third, low), strict=True):
            store(slot, 0, word)
        for slot, step in zip(key, _KEY_STEPS, strict=True):
            store(slot, 0, _sum(bind(load(slot, 0)), step))
    upper = tirx.shift_right(load(counter[0], 0), _u64(11))
    return bind(cast("float64", upper) * const(2.0**-53, "float64"))


def _u64(value: int) -> Expr:
    return const(value, "uint64")


def _low(word: Expr) -> Expr:
    return word & _u64(0xFFFFFFFF)


def _high(word: Expr) -> Expr:
    return tirx.shift_right(word, _u64(32))


def _halves(value: int) -> tuple[Expr, Expr]:
    high, low = divmod(value, 1 << 32)
    return _u64(high), _u64(low)


def _sum(a: Expr, b: int) -> Expr:
    """a + b, modulo 2**64."""
    b_high, b_low = _halves(b)
    low = bind(_low(a) + b_low)
    high = _high(a) + b_high + _high(low)
    return bind(tirx.shift_left(high, _u64(32)) | _low(low))


def _product(a: int, b: Expr) -> tuple[Expr, Expr]:
    """Low and high word of the 128-bit product of two 64-bit words."""
    a_high, a_low = _halves(a)
    b_high, b_low = bind(_high(b)), bind(_low(b))
    low, one, other = bind(a_low * b_low), bind(a_high * b_low), bind(a_low * b_high)
    middle = bind(_high(low) + _low(one) + _low(other))
    return (bind(tirx.shift_left(middle, _u64(32)) | _low(low)),
            bind(a_high * b_high + _high(one) + _high(other) + _high(middle)))
