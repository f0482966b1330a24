"""What a GPU family can do, as the kernel builders need it: limits, and how a dot product of four bytes is spelt.

One `Traits` object per target. Builders ask it for `dot4` and never name an intrinsic; none assumes how many lanes run
in step. Knows nothing of models or block formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx


@dataclass(frozen=True)
class Traits:
    """A GPU family.

    Attributes
    ----------
    code : str
        "vulkan" (GLSL, SPIR-V), "cuda" (CUDA C++) or "rocm" (LLVM).
    arch : str
        "sm_89", "gfx1151", …; "generic" for any Vulkan device.
    most_threads : int
        Threads of a workgroup that kernels may ask for.
    shared_bytes : int
        Workgroup memory that kernels may use.
    attention_slots : int
        Slots that share the context in attention: more fill a larger GPU, and cost more to merge.
    """

    code: str
    arch: str
    most_threads: int = 256
    shared_bytes: int = 32768
    attention_slots: int = 16

    def half_to_float(self, bits: Any) -> Any:
        """The float16 in the low half of `bits` (uint32, high half zero) as float32."""
        if self.code == "vulkan":
            return tirx.call_pure_extern("float32", "half_to_float", bits)
        return tirx.Cast("float32", tirx.reinterpret("float16", tirx.Cast("uint16", bits)))

    def dot4(self, a: Any, b: Any, c: Any) -> Any:
        """c + the dot product of the four signed bytes in a and in b; all int32."""
        if self.code == "cuda":
            return tirx.call_pure_extern("int32", "__dp4a", a, b, c)
        if self.code == "rocm":
            yes, no = tirx.const(1, "bool"), tirx.const(0, "bool")
            return tirx.call_llvm_pure_intrin("int32", "llvm.amdgcn.sudot4", yes, a, yes, b, c, no)
        return tirx.call_pure_extern("int32", "dot4_i8", a, b) + c
