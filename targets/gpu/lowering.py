"""What happens to a kernel between its builder and a code generator: loops, floored divisions, functions, constants.

TVM's `StmtSimplify` and `LowerIntrin` are left out on purpose: the one takes x - x for 0 and x == x for true, which
infinities and NaN are not, the other fuses a * b + c on some targets and not on others. Knows no code generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.builder import Kernel

LAUNCH = ("blockIdx.x", "threadIdx.x")

FUNCTIONS = frozenset({
    "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "trunc", "nearbyint", "fabs", "fma"})
"""Mathematical functions that kernels may call, by TIR's names; every code generator knows them all for float32."""
EXACT_FUNCTIONS = FUNCTIONS & {"sqrt", "floor", "ceil", "trunc", "nearbyint", "fabs", "fma"}
"""Those that every code generator knows for float64 too."""

Spelling = Callable[[str, str, Sequence[Any]], Any]
"""spelling(function, dtype, arguments): the call as a code generator takes it."""


def lower(kernel: Kernel, target: Any, spelling: Spelling) -> Any:
    """The kernel's device function (tirx.PrimFunc) for a code generator of the TVM target `target`.

    Raises `TargetError` for functions that not every target has.
    """
    import tvm
    import tvm_ffi
    from tvm import tirx

    refused: list[str] = []

    def call(x: Any) -> Any:
        name = x.op.name.partition(".")[2]
        if name == "reinterpret":
            return _constant_bits(x)
        if name not in FUNCTIONS:
            return x
        dtype = str(x.ty.dtype)
        if dtype != "float32" and not (dtype == "float64" and name in EXACT_FUNCTIONS):
            refused.append(f"{name} of {dtype}")
            return x
        return spelling(name, dtype, list(x.args))

    function = kernel.function.with_attr("target", target).with_attr("tirx.kernel_launch_params", list(LAUNCH))
    passes = [tirx.transform.VectorizeLoop(True), tirx.transform.UnrollLoop()]
    with target:
        module = tvm.ir.transform.Sequential(passes)(tvm.IRModule({kernel.name: function}))
    function = module[kernel.name]
    body = tvm_ffi.structural_map(function.body, [
        (tvm.ir.Call, call), (tirx.FloorDiv, _floor_divide), (tirx.FloorMod, _floor_modulo), (tirx.NE, _not_equal),
        (tirx.For, _bound_once)])
    if refused:
        raise TargetError(f"{refused[0]} found in kernel {kernel.name}; float32 expected, float64 for "
                          f"{', '.join(sorted(EXACT_FUNCTIONS))}")
    return function.with_body(body)


def as_called(name: str, dtype: str, arguments: Sequence[Any]) -> Any:
    """The spelling of a code generator that takes TIR's own functions."""
    from tvm import tirx

    return tirx.call_intrin(dtype, "prim.log2" if name == "log2" else f"tirx.{name}", *arguments)


def _floor_divide(x: Any) -> Any:
    """Floored division by the truncated one that machines have; a shift where the divisor is a power of two."""
    from tvm import tirx

    dtype = str(x.ty.dtype)
    if dtype.startswith("uint"):
        return tirx.truncdiv(x.a, x.b)
    if shift := _power_of_two(x.b):
        return tirx.shift_right(x.a, tirx.const(shift, dtype))
    quotient = tirx.truncdiv(x.a, x.b)
    return tirx.Select(_rounded_up(x), quotient - tirx.const(1, dtype), quotient)


def _floor_modulo(x: Any) -> Any:
    from tvm import tirx

    dtype = str(x.ty.dtype)
    if dtype.startswith("uint"):
        return tirx.truncmod(x.a, x.b)
    if shift := _power_of_two(x.b):
        return tirx.bitwise_and(x.a, tirx.const((1 << shift) - 1, dtype))
    remainder = tirx.truncmod(x.a, x.b)
    return tirx.Select(_rounded_up(x), remainder + x.b, remainder)


def _rounded_up(x: Any) -> Any:
    """Whether truncation rounds the quotient up: there is a remainder, and the signs differ."""
    from tvm import tirx

    zero = tirx.const(0, str(x.ty.dtype))
    return tirx.all(tirx.NE(tirx.truncmod(x.a, x.b), zero), tirx.LT(tirx.bitwise_xor(x.a, x.b), zero))


def _power_of_two(x: Any) -> int:
    """The exponent of a constant power of two above 1, 0 for everything else."""
    value = int(x.value) if type(x).__name__ == "IntImm" else 0
    return value.bit_length() - 1 if value > 1 and value & (value - 1) == 0 else 0


def _not_equal(x: Any) -> Any:
    """Floats that are not equal, NaN among them; TVM's LLVM takes NE for "less or greater"."""
    from tvm import tirx

    return tirx.Not(tirx.EQ(x.a, x.b)) if str(x.a.ty.dtype).startswith("float") else x


def _bound_once(x: Any) -> Any:
    """A loop whose extent is computed before it; C's `for` would compute it at every turn."""
    from tvm import tirx

    if type(x.extent).__name__ in ("IntImm", "Var"):
        return x
    extent = tirx.Var("extent", str(x.extent.ty.dtype))
    loop = tirx.For(x.loop_var, x.min, extent, x.kind, x.body, x.thread_binding, x.annotations, x.step)
    return tirx.SeqStmt([tirx.Bind(extent, x.extent), loop])


def _constant_bits(x: Any) -> Any:
    """A constant whose bits are taken as those of another type; CUDA C++ would take its address."""
    import numpy as np
    from tvm import tirx

    (value,), dtype = x.args, str(x.ty.dtype)
    if type(value).__name__ not in ("IntImm", "FloatImm"):
        return x
    bits = np.array(value.value).astype(str(value.ty.dtype)).view(dtype)
    return tirx.const(bits.item(), dtype)
