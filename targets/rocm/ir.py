"""GPU kernels as LLVM IR for AMDGPU: TVM's text, with what TVM leaves out or gets wrong without a device.

- Barriers order memory: TVM writes the bare instruction, across which LLVM may carry loads and stores.
- Workgroup sizes are those of the kernels, not a guess.
- The triple is the one that HIP's loader knows.
- Elements of a buffer are found by 32 bits behind its begin, which the hardware adds, and not by an address of 64 bits
  a load. Buffers have at most `hip.MOST_BINDING` bytes for it.

Knows nothing of object files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.builder import Kernel
from dflashc.targets.gpu.lowering import lower
from dflashc.targets.rocm.quiet import standard_error_dropped

TRIPLE = "amdgcn-amd-amdhsa"
_TVM_TRIPLE = f"{TRIPLE}-hcc"

_GROUP_SIZE = '"amdgpu-flat-work-group-size"'
_WAVES = 6  # leaves a wave 240 registers where a SIMD has 1536, 160 where it has 1024

_FENCE = re.compile(r"^ .*call void @dflashc_(workgroup|wavefront)_(release|acquire)\(.*$", re.MULTILINE)
_FENCE_DECLARATION = re.compile(r"^declare .*@dflashc_\w+_(release|acquire)\(.*$", re.MULTILINE)
_HALF_HELPER = re.compile(r"^define weak dso_local .*@__(truncsfhf2|extendhfsf2)\(.*?^}$", re.MULTILINE | re.DOTALL)
_DEVICE_ATTRIBUTE = re.compile(r' "(amdgpu-[a-z0-9-]+|uniform-work-group-size)"(="[^"]*")?')
_WIDENED = re.compile(r"^  (%[\w.]+) = sext i32 (%[\w.]+) to i64$", re.MULTILINE)
_ELEMENT = re.compile(
    r"^  (%[\w.]+) = getelementptr inbounds (?:nuw )?(\w+), ptr addrspace\(1\) (%[\w.]+), i64 (%[\w.]+)$", re.MULTILINE)
_SIZES = {"i8": 0, "i16": 1, "half": 1, "i32": 2, "float": 2, "i64": 3, "double": 3}  # as powers of two
_KERNEL = re.compile(r"^(define [^\n]*amdgpu_kernel void @[^\n]*\)[^\n]*#(\d+)) ?{", re.MULTILINE)


def kernel_ir(arch: str, kernel: Kernel) -> str:
    """The text of a module that holds this kernel alone."""
    import tvm

    _take_over_callbacks()
    with standard_error_dropped():  # warnings that there is no device here
        target = tvm.target.Target({"kind": "rocm", "mcpu": arch, "mtriple": _TVM_TRIPLE, "thread_warp_size": 32,
                                    "max_num_threads": 256, "max_threads_per_block": 256,
                                    "max_shared_memory_per_block": 65536})
        function = _with_cells(_with_fences(lower(kernel, target, _spelling)))
        module = tvm.get_global_func("target.build.rocm")(tvm.IRModule({kernel.name: function}), target)
        text: str = module.inspect_source("hip")
    return _corrected(text, kernel)


def eased(text: str) -> str:
    """The module of a kernel whose registers spilled: LLVM brings fewer loads forward for more waves at a time."""
    return text.replace(_GROUP_SIZE, f'"amdgpu-waves-per-eu"="{_WAVES}" {_GROUP_SIZE}')


def _spelling(name: str, dtype: str, arguments: Sequence[Any]) -> Any:
    """LLVM's intrinsics."""
    from tvm import tirx

    if name == "rsqrt":
        return tirx.const(1.0, dtype) / tirx.call_llvm_pure_intrin(dtype, "llvm.sqrt", *arguments)
    return tirx.call_llvm_pure_intrin(dtype, f"llvm.{name}", *arguments)


def _with_fences(function: Any) -> Any:
    """Every barrier between two calls of unknown functions, which no optimiser moves memory accesses across.

    Of a wave's barrier nothing else is left: its lanes run in step.
    """
    import tvm_ffi
    from tvm import tirx

    def fenced(x: Any) -> Any:
        if type(x.value).__name__ != "Call" or x.value.op.name != "tirx.tvm_storage_sync":
            return x
        wave = x.value.args[0].value == "warp"
        before, after = (tirx.Evaluate(tirx.call_extern("void", f"dflashc_{'wavefront' if wave else 'workgroup'}_{f}"))
                         for f in ("release", "acquire"))
        return tirx.SeqStmt([before, after] if wave else [before, x, after])

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.Evaluate, fenced)))


def _with_cells(function: Any) -> Any:
    """Every named scalar through a local buffer, which LLVM makes a register again.

    TVM's LLVM code generator otherwise puts what a name stands for in its place, to know its bounds, and again in what
    it finds there: it hangs at names that stand for names.
    """
    import tvm_ffi
    from tvm import tirx

    def stored(x: Any) -> Any:
        dtype = str(x.var.ty.dtype) if hasattr(x.var.ty, "dtype") else ""
        if not dtype or "x" in dtype or type(x.value).__name__ in ("Var", "IntImm", "TensorLoad"):
            return x
        cell, zero = tirx.decl_buffer((1,), dtype, scope="local"), tirx.const(0, "int32")
        load = tirx.BufferLoad(cell, [zero])
        return tirx.SeqStmt([tirx.AllocBuffer(cell), tirx.BufferStore(cell, x.value, [zero]), tirx.Bind(x.var, load)])

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.Bind, stored)))


def _corrected(text: str, kernel: Kernel) -> str:
    text = text.replace(_TVM_TRIPLE, TRIPLE)
    text = _FENCE.sub(r'  fence syncscope("\1") \2', text)
    text = _with_short_offsets(_FENCE_DECLARATION.sub("", _HALF_HELPER.sub("", text)))
    text = _DEVICE_ATTRIBUTE.sub("", text).replace("= { }", "= { nounwind }")  # deduced while the fences were calls
    found = _KERNEL.findall(text)
    if len(found) != 1:
        raise TargetError(f"{len(found)} kernels found in TVM's LLVM IR for {kernel.name}, 1 expected")
    size = f'{_GROUP_SIZE}="{kernel.threads},{kernel.threads}" "uniform-work-group-size"="true"'
    return text.replace(f"attributes #{found[0][1]} = {{", f"attributes #{found[0][1]} = {{ {size}")


def _with_short_offsets(text: str) -> str:
    """Indices are never negative, so that those which were widened to 64 bits are bytes in 32 bits just as well."""
    indices = dict(_WIDENED.findall(text))
    counter = count()

    def element(found: re.Match[str]) -> str:
        result, kind, buffer, wide = found.groups()
        if wide not in indices or kind not in _SIZES:
            return found[0]
        offset = f"%offset.{next(counter)}"
        return (f"  {offset} = shl nuw i32 {indices[wide]}, {_SIZES[kind]}\n"
                f"  {offset}.wide = zext i32 {offset} to i64\n"
                f"  {result} = getelementptr inbounds i8, ptr addrspace(1) {buffer}, i64 {offset}.wide")

    return _ELEMENT.sub(element, text)


@cache
def _take_over_callbacks() -> None:
    """Keep TVM from looking for ROCm's bitcode, which kernels do not need, and from linking, which is done here."""
    import tvm
    import tvm.support.rocm  # registers the callbacks that are replaced
    import tvm_ffi

    tvm_ffi.register_global_func("tvm_callback_rocm_bitcode_path", lambda: tvm.runtime.convert([]), override=True)
    tvm_ffi.register_global_func("tvm_callback_rocm_link", lambda code: bytearray(bytes(code)), override=True)
