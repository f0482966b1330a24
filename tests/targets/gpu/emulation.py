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
#include <thread>
#include <vector>
static thread_local int group_index, thread_index;
static std::barrier<>* meeting;
extern "C" int emulated_group() { return group_index; }
extern "C" int emulated_thread() { return thread_index; }
extern "C" void emulated_barrier() { meeting->arrive_and_wait(); }
extern "C" int emulated_dot4(bool, int a, bool, int b, int c, bool) {
  for (int i = 0; i < 4; ++i) c += int((signed char)(a >> 8 * i)) * int((signed char)(b >> 8 * i));
  return c;
}
extern "C" void run(void (*call)(void**), void** arguments, int groups, int threads) {
  for (int group = 0; group < groups; ++group) {
    std::barrier<> all(threads);
    meeting = &all;
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
#define __dp4a(a, b, c) emulated_dot4(true, a, true, b, c, false)
template <class T, class S> static T bits_as(S s) { T t; memcpy(&t, &s, sizeof t); return t; }
#define __int_as_float(i) bits_as<float, int>(i)
#define __longlong_as_double(i) bits_as<double, long long>(i)
#define rsqrtf(x) (1.0f / sqrtf(x))
typedef _Float16 half;
"""


def run_as(code: str, kernel: Kernel, arguments: Sequence[np.ndarray | float], groups: int) -> list[np.ndarray]:
    """The buffers, in order, after `groups` workgroups; `code` is "cuda" or "rocm", for which the kernel was built."""
    name = f"emulated_{kernel.name}"  # "accept" for example is a function of the system
    kernel = replace(kernel, name=name, function=kernel.function.with_attr("global_symbol", name))
    library = _cuda(kernel) if code == "cuda" else _rocm(kernel)
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


def _cuda(kernel: Kernel) -> ctypes.CDLL:
    prelude = re.sub(r"^typedef .* u?int\d+_t;\n", "", PRELUDE[: PRELUDE.index("struct half")], flags=re.MULTILINE)
    source = kernel_source("sm_89", [kernel]).replace("__shared__ alignas(64)", "alignas(64) static")
    return _library(f"#include <cstdint>\n{_CUDA}{prelude}{source}", kernel)


def _rocm(kernel: Kernel) -> ctypes.CDLL:
    llvm = pytest.importorskip("llvmlite.binding", reason="the ROCm code generator needs llvmlite")
    text = kernel_ir("gfx1151", kernel)
    for found, instead in (
            (r"^target datalayout.*$", ""), (r"^target triple.*$", ""), (r",? addrspace\(\d\)", ""),
            (r"\b(dllexport|amdgpu_kernel) ", ""), (r" immarg", ""), (r"addrspacecast", "bitcast"),
            (r'"(target-cpu|target-features|amdgpu[a-z-]*)"(="[^"]*")?', ""), (r"= \{\s*\}", "= { nounwind }"),
            (r"llvm\.amdgcn\.workgroup\.id\.x", "emulated_group"),
            (r"llvm\.amdgcn\.workitem\.id\.x", "emulated_thread"),
            (r"llvm\.amdgcn\.s\.barrier", "emulated_barrier"), (r"llvm\.amdgcn\.sudot4", "emulated_dot4")):
        text = re.sub(found, instead, text, flags=re.MULTILINE)
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
    return run_as(traits.code, kernel, arguments, groups)
