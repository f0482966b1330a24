"""Elementary functions on float32 vectors: exp, tanh, silu, gelu, the conversion from float16; and exp on float64.

Every level computes the same sequence of operations, so the results differ at most by the missing FMA of the generic
level. No libm call: LLVM would split a vector into scalar calls. Knows nothing of kernels.
"""

from __future__ import annotations

from tvm import tirx

from dflashc.targets.cpu.builder import Expr, bind, cast, const, load, local, reinterpret, store
from dflashc.targets.cpu.traits import Traits, intrinsic

ROUND_MAGIC = 12582912.0  # 1.5 * 2**23: adding it leaves the rounded integer in the low mantissa bits
ROUND_MAGIC_BITS = 0x4B400000
_ROUND_MAGIC_DOUBLE = 1.5 * 2.0**52


def dtype_of(value: Expr) -> str:
    return str(value.ty.dtype)


def _with_base(dtype: str, base: str) -> str:
    """`dtype` with another element type: ("float32x8", "int32") -> "int32x8"."""
    _, _, lanes = dtype.partition("x")
    return f"{base}x{lanes}" if lanes else base


def settle(value: Expr) -> Expr:
    """Name a value like `bind`, but hide how it was made: TVM's passes look through the bound values of an expression
    at every use, which takes time exponential in the length of a formula. LLVM removes the detour through memory.
    """
    base, _, width = dtype_of(value).partition("x")
    lanes = int(width or 1)
    slot = local(lanes, base)
    store(slot, 0, value, lanes)
    return bind(load(slot, 0, lanes))


def select(condition: Expr, a: Expr, b: Expr) -> Expr:
    return tirx.Select(condition, a, b)


def absolute(x: Expr) -> Expr:
    return intrinsic(dtype_of(x), "llvm.fabs", x)


def round_to_int(x: Expr) -> Expr:
    """Round half to even, as int32. |x| must stay below 2**22."""
    dtype = dtype_of(x)
    integer = _with_base(dtype, "int32")
    return reinterpret(integer, x + const(ROUND_MAGIC, dtype)) - const(ROUND_MAGIC_BITS, integer)


def _polynomial(traits: Traits, x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Horner's scheme, highest power first."""
    dtype = dtype_of(x)
    result = const(coefficients[0], dtype)
    for coefficient in coefficients[1:]:
        result = bind(traits.fma(result, x, const(coefficient, dtype)))
    return result


def exp(traits: Traits, x: Expr) -> Expr:
    """exp(x) over the whole range, within 2 ulp: 0 below -104, infinity above 89, NaN for NaN.

    exp(x) = 2**n * exp(f) with |f| <= ln(2)/2; coefficients of Cephes' expf (Moshier, 1984). 2**n is applied in two
    halves, so that denormal results are right and overflow gives infinity.
    """
    dtype = dtype_of(x)
    integer = _with_base(dtype, "int32")
    x = bind(select(x < const(-104.0, dtype), const(-104.0, dtype), x))  # a select keeps NaN, maxnum would not
    x = settle(select(x > const(89.0, dtype), const(89.0, dtype), x))
    shifted = traits.fma(x, const(1.4426950408889634, dtype), const(ROUND_MAGIC, dtype))
    whole = settle(reinterpret(integer, shifted) - const(ROUND_MAGIC_BITS, integer))
    n = bind(cast(dtype, whole))
    f = bind(traits.fma(n, const(-0.693359375, dtype), x))
    f = settle(traits.fma(n, const(2.12194440e-4, dtype), f))
    p = _polynomial(traits, f, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
                                5.0000001201e-1))
    p = bind(traits.fma(p, bind(f * f), f) + const(1.0, dtype))
    half = bind(tirx.shift_right(whole, const(1, integer)))

    def power(exponent: Expr) -> Expr:
        return reinterpret(dtype, tirx.shift_left(exponent + const(127, integer), const(23, integer)))

    return settle(p * power(half) * power(whole - half))


def rounded(product: Expr) -> Expr:
    """A float64 product that is rounded before it enters a sum. The code generator would fuse the two where it can."""
    return settle(intrinsic(dtype_of(product), "llvm.arithmetic.fence", product))


def exp_double(x: Expr) -> Expr:
    """exp(x) on float64 for x <= 0, within 2 ulp; the same bits on every level, since nothing is fused.

    Cephes' exp (Moshier, 1984): exp(f) = 1 + 2 f P(f^2) / (Q(f^2) - f P(f^2)); otherwise like `exp`.
    """
    def number(value: float) -> Expr:
        return const(value, "float64")

    def horner(coefficients: tuple[float, ...], at: Expr) -> Expr:
        result = number(coefficients[0])
        for coefficient in coefficients[1:]:
            result = settle(rounded(result * at) + number(coefficient))
        return result

    x = settle(select(x < number(-746.0), number(-746.0), x))
    shifted = settle(rounded(x * number(1.4426950408889634)) + number(_ROUND_MAGIC_DOUBLE))
    whole = settle(reinterpret("int64", shifted) - reinterpret("int64", number(_ROUND_MAGIC_DOUBLE)))
    n = bind(cast("float64", whole))
    f = settle(x - rounded(n * number(0.693145751953125)) - rounded(n * number(1.42860682030941723212e-6)))
    square = settle(f * f)
    p = rounded(f * horner((1.26177193074810590878e-4, 3.02994407707441961300e-2, 1.0), square))
    q = horner((3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.0), square)
    ratio = settle(p / (q - p))
    result = settle(ratio + ratio + number(1.0))
    half = bind(tirx.shift_right(whole, const(1, "int64")))

    def power(exponent: Expr) -> Expr:
        return reinterpret("float64", tirx.shift_left(exponent + const(1023, "int64"), const(52, "int64")))

    return rounded(result * power(half) * power(whole - half))


def sigmoid_times(traits: Traits, factor: Expr, x: Expr) -> Expr:
    """factor * sigmoid(x)."""
    dtype = dtype_of(x)
    return bind(factor / (const(1.0, dtype) + exp(traits, const(0.0, dtype) - x)))


def silu(traits: Traits, x: Expr) -> Expr:
    """x * sigmoid(x)."""
    return sigmoid_times(traits, x, x)


def gelu(traits: Traits, x: Expr) -> Expr:
    """The tanh form of GELU: 0.5 x (1 + tanh(y)) = x sigmoid(2 y), y = sqrt(2/pi) (x + 0.044715 x**3)."""
    dtype = dtype_of(x)
    cubic = bind(traits.fma(bind(x * x), const(0.044715, dtype), const(1.0, dtype)))
    return sigmoid_times(traits, x, settle(x * const(2 * 0.7978845608028654, dtype) * cubic))


def tanh(traits: Traits, x: Expr) -> Expr:
    """tanh(x), within 3 ulp: a polynomial (Cephes' tanhf) for |x| < 0.625, where 1 - 2 / (exp(2x) + 1) cancels."""
    dtype = dtype_of(x)
    square = bind(x * x)
    p = _polynomial(traits, square, (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
                                     -3.33332819422e-1))
    small = bind(traits.fma(bind(p * square), x, x))
    denominator = bind(exp(traits, x + x) + const(1.0, dtype))
    large = bind(const(1.0, dtype) - const(2.0, dtype) / denominator)
    return bind(select(absolute(x) < const(0.625, dtype), small, large))


def half_to_float(traits: Traits, bits: Expr) -> Expr:
    """float16 lanes, given as uint16, to float32, exactly; denormals, infinities and NaN included."""
    dtype = _with_base(dtype_of(bits), "float32")
    if traits.dot != "none":
        return bind(cast(dtype, reinterpret(_with_base(dtype, "float16"), bits)))
    # without F16C, LLVM would call a routine of the compiler's library: shift into place and rescale instead
    integer = _with_base(dtype, "uint32")
    wide = bind(cast(integer, bits))
    magnitude = bind(tirx.shift_left(wide & const(0x7FFF, integer), const(13, integer)))
    rescaled = reinterpret(integer, reinterpret(dtype, magnitude) * const(2.0**112, dtype))
    special = magnitude | const(0x7F800000, integer)
    value = select(magnitude >= const(0x0F800000, integer), special, rescaled)
    sign = tirx.shift_left(wide & const(0x8000, integer), const(16, integer))
    return bind(reinterpret(dtype, value | sign))
