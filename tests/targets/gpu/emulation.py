"""Runs on the CPU what the code generators for CUDA and ROCm write.

What is CUDA's or AMDGPU's own is replaced: indices, barriers, dot products, the type `half`, address spaces. The rest
is the code that artefacts are compiled from, here by g++ or by LLVM for this processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from dflashc.targets.cuda.source import PRELUDE, kernel_source
from dflashc.targets.gpu.builder import Kernel
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.rocm.ir import kernel_ir
from tests.targets.gpu.running import run_kernel

_KEPT = TemporaryDirectory(prefix="dflashc-emulation-")
_FOLDER = Path(_KEPT.name)

_CUDA = r"""
#include <string.h>
extern "C" { float fabsf(float), floorf(float), nearbyintf(float), sqrtf(float), fmaf(float, float, float); }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
template <class T> static T min(T a, T b) { return b < a ? b : a; }
extern "C" int emulated_group(); extern "C" int emulated_thread(); extern "C" void emulated_barrier();
extern "C" int emulated_dot4(bool, int, bool, int, int, bool);
extern "C" void emulated_mma(int*, const int*, const int*, int); extern "C" void emulated_wave_barrier();
static void multiply_m16n8k32(int* d, int a0, int a1, int a2, int a3, int b0, int b1, int c) {
  int a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
  d[0] = d[1] = d[2] = d[3] = c;
  emulated_mma(d, a, b, 32);
}
static void multiply_m16n8k16(int* d, int a0, int a1, int b0, int c) {
  int a[] = {a0, a1}, b[] = {b0};
  d[0] = d[1] = d[2] = d[3] = c;
  emulated_mma(d, a, b, 16);
}
struct EmulatedGroup { operator int() const { return emulated_group(); } };
struct EmulatedThread { operator int() const { return emulated_thread(); } };
static struct { EmulatedGroup x; } blockIdx;
static struct { EmulatedThread x; } threadIdx;
struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
#define __global__
#define __launch_bounds__(...)
#define __syncthreads emulated_barrier
#define __syncwarp emulated_wave_barrier
#define __dp4a(a, b, c) emulated_dot4(true, a, true, b, c, false)
template <class T, class S> static T bits_as(S s) { T t; memcpy(&t, &s, sizeof t); return t; }
#define __int_as_float(i) bits_as<float, int>(i)
#define __longlong_as_double(i) bits_as<double, long long>(i)
#define rsqrtf(x) (1.0f / sqrtf(x))
typedef _Float16 half;
"""


# A function of vectors as one of memory: LLVM and g++ need not pass vectors alike.
_WMMA = """
declare void @emulated_wmma_{n}(ptr, ptr, ptr)
define internal <8 x i32> @wmma_{n}(i1 %0, <{n} x i32> %a, i1 %1, <{n} x i32> %b, <8 x i32> %c, i1 %2) {{
  %x = alloca <{n} x i32>
  %y = alloca <{n} x i32>
  %d = alloca <8 x i32>
  store <{n} x i32> %a, ptr %x
  store <{n} x i32> %b, ptr %y
  store <8 x i32> %c, ptr %d
  call void @emulated_wmma_{n}(ptr %d, ptr %x, ptr %y)
  %r = load <8 x i32>, ptr %d
  ret <8 x i32> %r
}}
"""


def run_emulated(traits: Traits, kernel: Kernel, arguments: Sequence[np.ndarray | float],
                 groups: int) -> list[np.ndarray]:
    """The buffers, in order, after `groups` workgroups; of CUDA or ROCm."""
    gpu, buffers, scalars = _emulated_gpu(), [], []
    for declared, value in zip(kernel.arguments, arguments, strict=True):
        if declared.is_scalar:
            scalars.append(np.array([value], np.int32 if declared.kind == "i32" else np.float32))
        else:
            buffers.append(np.array(value, order="C"))
    places = [gpu.allocate_guarded(b.nbytes) for b in buffers]
    for place, buffer in zip(places, buffers, strict=True):
        ctypes.memmove(place, buffer.ctypes.data, buffer.nbytes)
    values = [*(np.array([place], np.uint64) for place in places), *scalars]  # in the order in which launches pass them
    pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
    well = gpu.run(ctypes.CDLL(str(_library(traits, kernel))).call, pointers, groups, kernel.threads)
    for place, buffer in zip(places, buffers, strict=True):
        ctypes.memmove(buffer.ctypes.data, place, buffer.nbytes)
        gpu.free_guarded(place, buffer.nbytes)
    assert well, f"{kernel.name} touched memory behind a buffer"
    return buffers


@cache
def _emulated_gpu() -> ctypes.CDLL:
    path = _FOLDER / "emulated_gpu.so"
    compile_gpu(path)
    gpu = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    gpu.run.restype = ctypes.c_bool
    gpu.allocate_guarded.restype = ctypes.c_void_p
    gpu.allocate_guarded.argtypes = [ctypes.c_size_t]
    gpu.free_guarded.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return gpu


def compile_gpu(path: Path) -> None:
    """The library with `run`, which kernels find their threads in."""
    link(path, Path(__file__).with_name("emulated_gpu.cpp"))


def _library(traits: Traits, kernel: Kernel) -> Path:
    """`compile_kernel`, once for the same code."""
    text = kernel.function.script() + repr((traits, kernel.arguments))
    path = _FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if not path.exists():
        compile_kernel(traits, kernel, path)
    return path


def compile_kernel(traits: Traits, kernel: Kernel, path: Path) -> None:
    """A library with `call`, which takes the addresses of a launch's values, and the `parameter_bytes` of these."""
    name = f"emulated_{kernel.name}"  # "accept" for example is a function of the system
    kernel = replace(kernel, name=name, function=kernel.function.with_attr("global_symbol", name))
    types = ["void*"] * sum(not a.is_scalar for a in kernel.arguments) + [
        {"i32": "int", "f32": "float"}[a.kind] for a in kernel.arguments if a.is_scalar]
    passed = [f"*({of}*)a[{i}]" for i, of in enumerate(types)]
    caller = (f'extern "C" void {name}({", ".join(types)});\n'
              f'extern "C" void call(void** a) {{ {name}({", ".join(passed)}); }}\n'
              f'extern "C" int parameter_bytes[] = {{{"".join(f"sizeof({of}), " for of in types)}0}};\n')
    calling = path.with_suffix(".call.cpp")
    calling.write_text(caller)
    code = path.with_suffix(".cpp" if traits.code == "cuda" else ".o")
    code.write_bytes((_cuda if traits.code == "cuda" else _rocm)(kernel, traits.arch))
    link(path, calling, code)


def _cuda(kernel: Kernel, arch: str) -> bytes:
    prelude = re.sub(r"^typedef .* u?int\d+_t;\n", "", PRELUDE[: PRELUDE.index("struct half")], flags=re.MULTILINE)
    source = kernel_source(arch, [kernel]).replace("__shared__ alignas(64)", "alignas(64) static")
    return f"#include <stdint.h>\n{_CUDA}{prelude}{source}".encode()


def _rocm(kernel: Kernel, arch: str) -> bytes:
    llvm = pytest.importorskip("llvmlite.binding", reason="the ROCm code generator needs llvmlite")
    text = kernel_ir(arch, kernel)
    for found, instead in (
            (r"^target datalayout.*$", ""), (r"^target triple.*$", ""), (r",? addrspace\(\d\)", ""),
            (r"\b(dllexport|amdgpu_kernel) ", ""), (r" immarg", ""), (r"addrspacecast", "bitcast"),
            (r'"(target-cpu|target-features|amdgpu[a-z-]*)"(="[^"]*")?', ""), (r"= \{\s*\}", "= { nounwind }"),
            (r"llvm\.amdgcn\.workgroup\.id\.x", "emulated_group"),
            (r"llvm\.amdgcn\.workitem\.id\.x", "emulated_thread"),
            (r"llvm\.amdgcn\.s\.barrier", "emulated_barrier"), (r"llvm\.amdgcn\.sudot4", "emulated_dot4"),
            (r'fence syncscope\("wavefront"\) release', "call void @emulated_wave_barrier()"),
            (r'fence syncscope\("wavefront"\) acquire', ""), (r"^declare .*wmma.*$", ""),
            (r"llvm\.amdgcn\.wmma\.i32\.16x16x16\.iu8\.v8i32\.v(\d)i32", r"wmma_\1")):
        text = re.sub(found, instead, text, flags=re.MULTILINE)
    text += "declare void @emulated_wave_barrier()\n" + "".join(
        _WMMA.format(n=n) for n in sorted(set(re.findall(r"@wmma_(\d)", text))))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=1, reloc="pic")
    return bytes(machine.emit_object(llvm.parse_assembly(text)))


def link(path: Path, *files: Path) -> None:
    """A library of C++ and object files; skips the test without a compiler."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing (Debian: apt install g++)")
    subprocess.run(["g++", "-std=c++20", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC",
                    "-mfma", "-mf16c", "-o", str(path), *map(str, files)], check=True)


def run_anywhere(traits: Traits, kernel: Kernel, arguments: Sequence[np.ndarray | float],
                 groups: int) -> list[np.ndarray]:
    """The kernel's buffers after a run: of Vulkan on a device, of CUDA and ROCm here."""
    if traits.code == "vulkan":
        return run_kernel(kernel, arguments, groups, traits)
    return run_emulated(traits, kernel, arguments, groups)
