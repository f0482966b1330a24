"""Runs on the CPU what the code generators for CUDA and ROCm write, one thread of the machine per thread of the GPU.

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
from dflashc.targets.gpu.builder import Argument, Kernel
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.rocm.ir import kernel_ir
from tests.targets.gpu.running import run_kernel

_FOLDER = TemporaryDirectory(prefix="dflashc-emulation-")

_RUNNER = r"""
#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
struct Wave {  // 32 threads that run in step, and the registers that they hand to a matrix unit
  std::barrier<> meeting{32};
  int a[32][4], b[32][4];
};
static std::vector<std::unique_ptr<Wave>> waves;
static thread_local int group_index, thread_index;
static std::barrier<>* meeting;
extern "C" int emulated_group() { return group_index; }
extern "C" int emulated_thread() { return thread_index; }
extern "C" void emulated_barrier() { meeting->arrive_and_wait(); }
extern "C" int emulated_dot4(bool, int a, bool, int b, int c, bool) {
  for (int i = 0; i < 4; ++i) c += int((signed char)(a >> 8 * i)) * int((signed char)(b >> 8 * i));
  return c;
}
extern "C" void emulated_wave_barrier() { waves[thread_index / 32]->meeting.arrive_and_wait(); }
typedef void Read(int lane, int byte, int& row, int& k);
static void gather(int (&matrix)[16][32], int (&registers)[32][4], int bytes, Read read) {
  for (int lane = 0; lane < 32; ++lane)
    for (int byte = 0; byte < bytes; ++byte) {
      int row, k;
      read(lane, byte, row, k);
      matrix[row][k] = (signed char)(registers[lane][byte / 4] >> 8 * (byte % 4));
    }
}
static void multiply(int* d, const int* a, const int* b, int bytes_a, int bytes_b, int k, Read read_a, Read read_b,
                     int results, void place(int lane, int i, int& row, int& column)) {
  int lane = thread_index % 32;
  Wave& wave = *waves[thread_index / 32];
  memcpy(wave.a[lane], a, bytes_a);
  memcpy(wave.b[lane], b, bytes_b);
  wave.meeting.arrive_and_wait();
  int left[16][32], right[16][32];  // both with a row per row or column of the result
  gather(left, wave.a, bytes_a, read_a);
  gather(right, wave.b, bytes_b, read_b);
  wave.meeting.arrive_and_wait();
  for (int i = 0; i < results; ++i) {
    int row, column;
    place(lane, i, row, column);
    for (int j = 0; j < k; ++j) d[i] += left[row][j] * right[column][j];
  }
}
// PTX ISA, matrix fragments for mma.m16n8k16 and m16n8k32 with .s8
extern "C" void emulated_mma(int* d, const int* a, const int* b, int k) {
  multiply(d, a, b, k / 2, k / 4, k,
           [](int lane, int i, int& row, int& k) {
             row = i < 4 || (8 <= i && i < 12) ? lane / 4 : lane / 4 + 8;
             k = lane % 4 * 4 + (i & 3) + (i < 8 ? 0 : 16);
           },
           [](int lane, int i, int& row, int& k) {
             row = lane / 4;
             k = lane % 4 * 4 + (i & 3) + (i < 4 ? 0 : 16);
           },
           4,
           [](int lane, int i, int& row, int& column) {
             row = i < 2 ? lane / 4 : lane / 4 + 8;
             column = lane % 4 * 2 + (i & 1);
           });
}
// RDNA 3 ISA 7.9: both halves of the wave hold all of K
static void read_rdna3(int lane, int i, int& row, int& k) { row = lane % 16; k = i; }
extern "C" void emulated_wmma_4(int* d, const int* a, const int* b) {
  multiply(d, a, b, 16, 16, 16, read_rdna3, read_rdna3, 8, [](int lane, int i, int& row, int& column) {
    row = 2 * i + lane / 16;
    column = lane % 16;
  });
  int lane = thread_index % 32;
  Wave& wave = *waves[thread_index / 32];
  if (memcmp(wave.a[lane], wave.a[lane % 16], 16) || memcmp(wave.b[lane], wave.b[lane % 16], 16))
    for (int i = 0; i < 8; ++i) d[i] = -1;  // NaN, once it is taken for a float: the result is not defined
  wave.meeting.arrive_and_wait();
}
// RDNA 4 ISA 7.12: each half of the wave holds half of K
static void read_rdna4(int lane, int i, int& row, int& k) { row = lane % 16; k = lane / 16 * 8 + i; }
extern "C" void emulated_wmma_2(int* d, const int* a, const int* b) {
  multiply(d, a, b, 8, 8, 16, read_rdna4, read_rdna4, 8, [](int lane, int i, int& row, int& column) {
    row = lane / 16 * 8 + i;
    column = lane % 16;
  });
}
extern "C" void run(void (*call)(void**), void** arguments, int groups, int threads) {
  for (int group = 0; group < groups; ++group) {
    std::barrier<> all(threads);
    meeting = &all;
    waves.clear();
    for (int wave = 0; wave < threads / 32; ++wave) waves.push_back(std::make_unique<Wave>());
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread)
      running.emplace_back([=] {
        group_index = group;
        thread_index = thread;
        call(arguments);
        meeting->arrive_and_drop();
      });
    for (auto& thread : running) thread.join();
  }
}
"""

_CUDA = r"""
#include <cmath>
#include <cstring>
#include <algorithm>
using std::max; using std::min;
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
    name = f"emulated_{kernel.name}"  # "accept" for example is a function of the system
    kernel = replace(kernel, name=name, function=kernel.function.with_attr("global_symbol", name))
    library = (_cuda if traits.code == "cuda" else _rocm)(kernel, traits.arch)
    arrays, values = [], []
    for declared, value in zip(kernel.arguments, arguments, strict=True):
        if declared.is_scalar:
            values.append(np.array([value], np.int32 if declared.kind == "i32" else np.float32))
        else:
            arrays.append(np.array(value, order="C"))
            values.append(arrays[-1])
    pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
    _threads().run(library.call, pointers, groups, kernel.threads)
    return arrays


def _cuda(kernel: Kernel, arch: str) -> ctypes.CDLL:
    prelude = re.sub(r"^typedef .* u?int\d+_t;\n", "", PRELUDE[: PRELUDE.index("struct half")], flags=re.MULTILINE)
    source = kernel_source(arch, [kernel]).replace("__shared__ alignas(64)", "alignas(64) static")
    return _library(f"#include <cstdint>\n{_CUDA}{prelude}{source}", kernel)


def _rocm(kernel: Kernel, arch: str) -> ctypes.CDLL:
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
    path = Path(_FOLDER.name) / f"{hashlib.sha256(text.encode()).hexdigest()}.o"
    path.write_bytes(machine.emit_object(llvm.parse_assembly(text)))
    return _library("", kernel, path)


def _library(source: str, kernel: Kernel, *objects: Path) -> ctypes.CDLL:
    """The kernel, and `call(arguments)` that calls it."""
    buffers = [i for i, a in enumerate(kernel.arguments) if not a.is_scalar]
    scalars = [i for i, a in enumerate(kernel.arguments) if a.is_scalar]
    passed = [f"a[{i}]" for i in buffers] + [f"*({_scalar(kernel.arguments[i])}*)a[{i}]" for i in scalars]
    types = ["void*"] * len(buffers) + [_scalar(kernel.arguments[i]) for i in scalars]
    caller = (f'extern "C" void {kernel.name}({", ".join(types)});\n'
              f'extern "C" void call(void** a) {{ {kernel.name}({", ".join(passed)}); }}\n')
    _threads()  # has what the library asks for
    return _linked((source, caller), tuple(map(str, objects)))


def _scalar(argument: Argument) -> str:
    return {"i32": "int", "f32": "float"}[argument.kind]


@cache
def _threads() -> ctypes.CDLL:
    return _linked((_RUNNER,), (), ctypes.RTLD_GLOBAL)


@cache
def _linked(sources: tuple[str, ...], objects: tuple[str, ...], mode: int = ctypes.RTLD_LOCAL) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing (Debian: apt install g++)")
    name = Path(_FOLDER.name) / hashlib.sha256("".join(sources + objects).encode()).hexdigest()
    files = []
    for index, text in enumerate(sources):
        files.append(name.with_suffix(f".{index}.cpp"))
        files[-1].write_text(text)
    subprocess.run(["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC",
                    "-mfma", "-o", f"{name}.so", *map(str, files), *objects], check=True)
    return ctypes.CDLL(f"{name}.so", mode)


def run_anywhere(traits: Traits, kernel: Kernel, arguments: Sequence[np.ndarray | float],
                 groups: int) -> list[np.ndarray]:
    """The kernel's buffers after a run: of Vulkan on a device, of CUDA and ROCm here."""
    if traits.code == "vulkan":
        return run_kernel(kernel, arguments, groups, traits)
    return run_emulated(traits, kernel, arguments, groups)
