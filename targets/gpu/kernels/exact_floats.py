"""Small integers and floats into each other by the bits of 1.5 * 2^23, whose neighbours are the integers.

Two additions at full rate on every GPU, where conversions run at a fraction of it on some (NVIDIA: an eighth; CUDA C++
Programming Guide, throughput of native arithmetic instructions). A sum of products that starts at `OFFSET_BITS` is half
converted already. Exact for |integer| < 2^22.
"""

from __future__ import annotations

from dflashc.targets.gpu.builder import Expr, bind, f32, i32, reinterpret

OFFSET = 12582912.0  # 1.5 * 2^23
OFFSET_BITS = 0x4B400000
"""The bits of `OFFSET`; adding n to them gives those of OFFSET + n."""


def nearest(x: Expr) -> tuple[Expr, Expr]:
    """The integer nearest x, half to even, as int32 and as float32."""
    shifted = bind(x + f32(OFFSET))
    return bind(reinterpret("int32", shifted) - i32(OFFSET_BITS)), bind(shifted - f32(OFFSET))


def float_of(integer: Expr) -> Expr:
    """An int32 as float32."""
    return float_of_sum(integer + i32(OFFSET_BITS))


def float_of_sum(integer: Expr) -> Expr:
    """An int32 to which `OFFSET_BITS` was added already, as float32 without it."""
    return bind(bind(reinterpret("float32", integer)) - f32(OFFSET))
