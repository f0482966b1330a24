"""Rotary position embedding: the cosines and sines of a program's rows.

Owns range reduction and polynomials in float64. Knows nothing of how the pairs of a head are chosen (attention does).
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, Kernel, KernelBuilder, bind, cast, const, load, store
from dflashc.targets.cpu.traits import Traits

_HALF_PI = math.pi / 2
_HALF_PI_HIGH = math.ldexp(round(math.ldexp(_HALF_PI, 32)), -32)  # 33 bits: exact times any quarter turn below 2^20
_HALF_PI_LOW = 6.123233995736766e-17 + (_HALF_PI - _HALF_PI_HIGH)  # the rest, with the bits that math.pi lacks

# Taylor coefficients; |x| <= pi/4 leaves 4e-13 (sine) and 3e-14 (cosine).
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(7)]


def _polynomial(coefficients: list[float], x: Expr) -> Expr:
    result = const(coefficients[-1], "float64")
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + const(coefficient, "float64")
    return result


def emit_cosine_sine(angle: Expr) -> tuple[Expr, Expr]:
    """Cosine and sine of a float64 angle in [0, 2^20), as float64, to 1e-10 absolute.

    Reduction to a quarter turn as of Cody and Waite, "Software Manual for the Elementary Functions" (1980), ch. 8.
    """
    quarter = bind(cast("int32", angle * const(1 / _HALF_PI, "float64") + const(0.5, "float64")))
    turns = bind(cast("float64", quarter))
    x = bind((angle - turns * const(_HALF_PI_HIGH, "float64")) - turns * const(_HALF_PI_LOW, "float64"))
    square = bind(x * x)
    sine = bind(x * _polynomial(_SINE, square))
    cosine = bind(_polynomial(_COSINE, square))
    odd = bind(tirx.bitwise_and(quarter, const(1, "int32")) == const(1, "int32"))
    c = tirx.Select(odd, sine, cosine)
    s = tirx.Select(odd, cosine, sine)
    # quarter turns 1 and 2 have a negative cosine, 2 and 3 a negative sine
    c_negative = tirx.bitwise_and(quarter + const(1, "int32"), const(2, "int32")) != const(0, "int32")
    s_negative = tirx.bitwise_and(quarter, const(2, "int32")) != const(0, "int32")
    zero = const(0, "float64")
    return bind(tirx.Select(c_negative, zero - c, c)), bind(tirx.Select(s_negative, zero - s, s))


def rope_table(traits: Traits) -> Kernel:
    """Cosine and sine of every rotary pair at each row's position. One unit = one row; units = rows.

    angle(row, i) = (n + row) * inverse_frequency[i], below 2^20; absolute error below 1e-7 * magnitude.

    Arguments
    ---------
    state : int64 buffer; state[0] is n, the position of row 0
    inverse_frequency : float64 (pairs,)
    cosine, sine : float32 (rows, pairs), written
    pairs : i64; half the number of rotated dimensions
    magnitude : f32; factor on both tables (YaRN's attention factor; 1 otherwise)
    """
    kernel = KernelBuilder("rope_table", traits)
    with kernel.build():
        state = kernel.buffer("state", "int64")
        inverse_frequency = kernel.buffer("inverse_frequency", "float64")
        cosine, sine = kernel.buffer("cosine", "float32"), kernel.buffer("sine", "float32")
        pairs, magnitude = kernel.scalar("pairs"), kernel.scalar("magnitude", "f32")
        with kernel.units() as row:
            position = bind(cast("float64", load(state, 0) + row))
            with T.serial(0, pairs) as i:
                c, s = emit_cosine_sine(bind(position * load(inverse_frequency, i)))
                store(cosine, row * pairs + i, cast("float32", c) * magnitude)
                store(sine, row * pairs + i, cast("float32", s) * magnitude)
    return kernel.kernel
