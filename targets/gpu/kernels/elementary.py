"""Elementary functions on float32 by polynomials of our own: the same steps, and so the same accuracy, on every vendor.

Knows nothing of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, bind, f32, fma, i32, reinterpret, select
from dflashc.targets.gpu.kernels.exact_floats import nearest

LOG2_E = 1.4426950408889634


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's scheme, highest power first."""
    result = f32(coefficients[0])
    for coefficient in coefficients[1:]:
        result = bind(fma(result, x, f32(coefficient)))
    return result


def exp2(x: Expr) -> Expr:
    """2^x for x <= 0, within 2 ulp; 1 at 0, and 0 below -126.5.

    2^x = 2^n * 2^f with |f| <= 1/2; coefficients of Cephes' exp2f (Moshier, 1984).
    """
    x = bind(tirx.max(x, f32(-127)))  # n >= -127, for which the bits of 2^n are those of 0
    whole, nearest_x = nearest(x)
    f = bind(x - nearest_x)
    p = polynomial(f, (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
                       2.402264791363012e-1, 6.931472028550421e-1, 1.0))
    return bind(p * reinterpret("float32", tirx.shift_left(whole + i32(127), i32(23))))


def tanh(x: Expr) -> Expr:
    """tanh(x), within 4 ulp: Cephes' tanhf (Moshier, 1984) below 0.625, (1 - e) / (1 + e) with e = exp(-2|x|) above."""
    size = bind(tirx.abs(x))
    square = bind(x * x)
    p = polynomial(square, (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
                            -3.33332819422e-1))
    small = bind(fma(bind(p * square), x, x))
    e = exp2(bind(size * f32(-2 * LOG2_E)))
    large = bind((f32(1) - e) / (f32(1) + e))
    return bind(select(size < f32(0.625), small, select(x < f32(0), f32(0) - large, large)))


def cosine_sine(x: Expr) -> tuple[Expr, Expr]:
    """Cosine and sine for |x| <= pi/4, within 2 ulp; coefficients of Cephes' sinf (Moshier, 1984)."""
    square = bind(x * x)
    p = polynomial(square, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2, -0.5))
    q = polynomial(square, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
    return bind(fma(p, square, f32(1))), bind(fma(bind(q * square), x, x))
