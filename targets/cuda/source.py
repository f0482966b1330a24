"""GPU kernels as one CUDA C++ translation unit: TVM's code under a prelude of ours. Knows nothing of compilers."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Sequence
from typing import Any

from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.builder import Kernel
from dflashc.targets.gpu.lowering import lower

# TVM's own prelude includes libcu++ and cuda_fp16.h, whose parsing takes several times longer than the kernels, and
# needs 30 MB of headers. What kernels use of it is here; conversions round to nearest even.
PRELUDE = """\
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)
#define CUDART_INF __longlong_as_double(0x7ff0000000000000)
#define CUDART_NAN __longlong_as_double(0xfff8000000000000)
struct half {
  unsigned short bits;
  half() = default;
  explicit __device__ half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
"""

MATRIX_UNIT = """\
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void multiply_m16n8k32(int* d, int a0, int a1, int a2, int a3, int b0, int b1, int c) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c));
}
__device__ __forceinline__ void multiply_m16n8k16(int* d, int a0, int a1, int b0, int c) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b0), "r"(c));
}
#endif
"""
"""What `matrix_units.TensorCores` calls: d = a b + c, c the same in all elements."""

_FIRST_KERNEL = 'extern "C" __global__'
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\) (\w+)\(")
_RESIDENT_THREADS = 512


def translation_unit(sources: Sequence[str], spilled: Collection[str] = ()) -> str:
    """Kernels under the prelude.

    512 threads of a multiprocessor find registers, 128 each: left alone, ptxas keeps more threads resident and spills
    for it. Kernels that are named as `spilled` may have twice as many.
    """
    def bounds(m: re.Match[str]) -> str:
        blocks = 1 if m[2] in spilled else max(1, _RESIDENT_THREADS // int(m[1]))
        return f"__launch_bounds__({m[1]}, {blocks}) {m[2]}("

    return PRELUDE + MATRIX_UNIT + "".join(_LAUNCH_BOUNDS.sub(bounds, source) for source in sources)


def kernel_source(arch: str, kernels: Sequence[Kernel]) -> str:
    """The kernels in CUDA C++, for `translation_unit`."""
    import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    module = tvm.IRModule({k.name: _with_exact_constants(lower(k, target, _spelling)) for k in kernels})
    source: str = tvm.get_global_func("target.build.cuda")(module, target).inspect_source("cuda")
    before, start, rest = source.partition(_FIRST_KERNEL)
    if not start:
        raise TargetError(f"TVM wrote no kernel for {arch}: {before[:80]}")
    return start + rest


def _spelling(name: str, dtype: str, arguments: Sequence[Any]) -> Any:
    """C's names: `expf` for float32, `exp` for float64."""
    from tvm import tirx

    return tirx.call_pure_extern(dtype, f"{name}f" if dtype == "float32" else name, *arguments)


def _with_exact_constants(function: Any) -> Any:
    """float64 constants by their bits: TVM writes them with 16 digits, which is one too few."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    def constant(x: Any) -> Any:
        if str(x.ty.dtype) != "float64":
            return x
        (bits,) = struct.unpack("<q", struct.pack("<d", x.value))
        return tirx.call_pure_extern("float64", "__longlong_as_double", tirx.const(bits, "int64"))

    return function.with_body(tvm_ffi.structural_map(function.body, (tvm.ir.prim.FloatImm, constant)))
