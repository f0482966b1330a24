"""exp on float64, by basic operations alone; code generators fuse none of them, so every device computes the same bits.

Knows nothing of kernels.
"""

from __future__ import annotations

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, bind, cast, const, reinterpret, select

_ROUND = 1.5 * 2.0**52  # adding it leaves the rounded integer in the low mantissa bits


def exp_double(x: Expr) -> Expr:
    """exp(x) on float64 for x <= 0, within 2 ulp.

    Cephes' exp (Moshier, 1984): exp(f) = 1 + 2 f P(f^2) / (Q(f^2) - f P(f^2)) for exp(x) = 2**n * exp(f), |f| <=
    ln(2)/2. 2**n is applied in two halves, so that it never leaves float64's range.
    """
    x = bind(select(x < _number(-746.0), _number(-746.0), x))
    shifted = bind(x * _number(1.4426950408889634) + _number(_ROUND))
    whole = bind(reinterpret("int64", shifted) - reinterpret("int64", _number(_ROUND)))
    n = bind(cast("float64", whole))
    f = bind(x - n * _number(0.693145751953125) - n * _number(1.42860682030941723212e-6))
    square = bind(f * f)
    p = bind(f * _polynomial((1.26177193074810590878e-4, 3.02994407707441961300e-2, 1.0), square))
    q = _polynomial((3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.0), square)
    ratio = bind(p / (q - p))
    result = bind(ratio + ratio + _number(1.0))
    half = bind(tirx.shift_right(whole, const(1, "int64")))
    return bind(result * _power(half) * _power(whole - half))


def _number(value: float) -> Expr:
    return const(value, "float64")


def _polynomial(coefficients: tuple[float, ...], at: Expr) -> Expr:
    """Horner's scheme, highest power first."""
    result = _number(coefficients[0])
    for coefficient in coefficients[1:]:
        result = bind(result * at + _number(coefficient))
    return result


def _power(exponent: Expr) -> Expr:
    """2**exponent, int64."""
    return reinterpret("float64", tirx.shift_left(exponent + const(1023, "int64"), const(52, "int64")))
