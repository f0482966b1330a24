"""TIR expressions as GLSL text. What GLSL cannot say as TIR means it is refused by name.

Operands are always put in parentheses: no precedence is relied on. Knows nothing of statements.
"""

from __future__ import annotations

from typing import Any

import tvm

from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.lowering import FUNCTIONS
from dflashc.targets.vulkan.glsl_types import (
    Names,
    element_and_lanes,
    extensions_of,
    float_literal,
    integer_literal,
    spell,
)

_OPERATORS = {
    "Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%", "BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^",
    "LShift": "<<", "RShift": ">>",
}
"""Component-wise in GLSL, so that they take vectors too."""
_CONDITIONS = {"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!="}

_FUNCTIONS = {"rsqrt": "inversesqrt", "nearbyint": "roundEven", "fabs": "abs"}
"""GLSL's names of functions, where they are not TIR's."""
_BITS = {
    ("float32", "uint32"): "uintBitsToFloat", ("float32", "int32"): "intBitsToFloat",
    ("uint32", "float32"): "floatBitsToUint", ("int32", "float32"): "floatBitsToInt",
    ("float16", "uint16"): "uint16BitsToFloat16", ("float16", "int16"): "int16BitsToFloat16",
    ("uint16", "float16"): "float16BitsToUint16", ("int16", "float16"): "float16BitsToInt16",
    ("float64", "uint64"): "uint64BitsToDouble", ("float64", "int64"): "int64BitsToDouble",
    ("uint64", "float64"): "doubleBitsToUint64", ("int64", "float64"): "doubleBitsToInt64",
}

_HALF_TO_FLOAT = """\
float half_to_float(uint bits) {
  return unpackHalf2x16(bits).x;
}"""
_DOT4 = """\
int dot4_i8(int a, int b) {
  return bitfieldExtract(a, 0, 8) * bitfieldExtract(b, 0, 8) + bitfieldExtract(a, 8, 8) * bitfieldExtract(b, 8, 8)
      + bitfieldExtract(a, 16, 8) * bitfieldExtract(b, 16, 8) + bitfieldExtract(a, 24, 8) * bitfieldExtract(b, 24, 8);
}"""
_DOT4_INSTRUCTION = """\
// OpSDot with both operands as four packed bytes
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450)
int dot4_packed(int a, int b, spirv_literal int packed_format);
int dot4_i8(int a, int b) {
  return dot4_packed(a, b, 0);
}"""


class Expressions:
    """Writes expressions of one kernel, and collects what they need declared.

    Attributes
    ----------
    spelling : dict
        Variables and buffers by their name in the shader; a scalar parameter's is a member of the push constants.
    extensions : set of str
        GLSL extensions in use.
    helpers : dict
        Functions in use, by name.
    views : set of (parameter, lanes)
        Buffers that are read or written as vectors.
    read : set
        Buffer parameters that are read.
    """

    def __init__(self, packed_dot: bool) -> None:
        self.names = Names()
        self.spelling: dict[Any, str] = {}
        self.parameter_of: dict[Any, Any] = {}
        self.extensions: set[str] = set()
        self.helpers: dict[str, str] = {}
        self.views: set[tuple[Any, int]] = set()
        self.read: set[Any] = set()
        self.lines: list[str] = []
        self._depth = 1
        self._packed_dot = packed_dot
        self._analyzer = tvm.sym.Analyzer()

    def line(self, text: str) -> None:
        self.lines.append("  " * self._depth + text)

    def type_of(self, value: Any) -> str:
        """The GLSL type of an expression, variable or buffer element; notes the extensions that it needs."""
        element, lanes = element_and_lanes(value)
        self.extensions.update(extensions_of(element))
        return spell(element, lanes)

    def name(self, key: Any, hint: str) -> str:
        """A new name for a variable or buffer."""
        self.spelling[key] = self.names.new(hint)
        return self.spelling[key]

    def text(self, x: Any) -> str:
        """The expression in GLSL. Raises `TargetError` naming what cannot be said."""
        kind = type(x).__name__
        if kind in _OPERATORS:
            return f"({self.text(x.a)} {_OPERATORS[kind]} {self.text(x.b)})"
        writer = getattr(self, f"_{kind}", None)
        if writer is None and kind in _CONDITIONS:
            self._refuse_vector(x.a, f"comparison {kind}")
            return f"({self.text(x.a)} {_CONDITIONS[kind]} {self.text(x.b)})"
        if writer is None:
            raise TargetError(f"expression {kind} found in a kernel; there is no GLSL for it: {str(x)[:80]}")
        return str(writer(x))

    def _refuse_vector(self, x: Any, what: str) -> None:
        if element_and_lanes(x)[1] > 1:
            raise TargetError(f"{what} of vectors found in a kernel; expected one of scalars: {str(x)[:80]}")

    def _IntImm(self, x: Any) -> str:
        self.type_of(x)
        return integer_literal(x.value, element_and_lanes(x)[0])

    def _FloatImm(self, x: Any) -> str:
        self.type_of(x)
        return float_literal(x.value, element_and_lanes(x)[0])

    def _Var(self, x: Any) -> str:
        if x not in self.spelling:
            raise TargetError(f"variable {x.name} found in a kernel before it is bound")
        return self.spelling[x]

    def _Cast(self, x: Any) -> str:
        return f"{self.type_of(x)}({self.text(x.value)})"

    def _Broadcast(self, x: Any) -> str:
        return f"{self.type_of(x)}({self.text(x.value)})"

    def _Max(self, x: Any) -> str:
        return f"max({self.text(x.a)}, {self.text(x.b)})"

    def _Min(self, x: Any) -> str:
        return f"min({self.text(x.a)}, {self.text(x.b)})"

    def _Not(self, x: Any) -> str:
        return f"(!{self.text(x.a)})"

    def _BitwiseNot(self, x: Any) -> str:
        return f"(~{self.text(x.a)})"

    def _And(self, x: Any) -> str:
        return f"({self.text(x.a)} && {self.text(x.b)})"

    def _Or(self, x: Any) -> str:
        return f"({self.text(x.a)} || {self.text(x.b)})"

    def _Select(self, x: Any) -> str:
        self._refuse_vector(x, "a select")
        return f"({self.text(x.condition)} ? {self.text(x.true_value)} : {self.text(x.false_value)})"

    def _Shuffle(self, x: Any) -> str:
        """Only what takes one lane out of one vector, or puts scalars together."""
        indices = [int(i) for i in x.indices]
        if len(x.vectors) == 1 and len(indices) == 1:
            return f"{self.text(x.vectors[0])}[{indices[0]}]"
        if indices == list(range(len(x.vectors))) and all(element_and_lanes(v)[1] == 1 for v in x.vectors):
            return f"{self.type_of(x)}({', '.join(self.text(v) for v in x.vectors)})"
        raise TargetError(f"a shuffle of several lanes found in a kernel; there is no GLSL for it: {str(x)[:80]}")

    def element(self, buffer: Any, index: Any, value: Any) -> str:
        """`buffer[index]` as something to read or assign; a run of lanes needs an aligned, global one."""
        parameter = self.parameter_of.get(buffer)
        lanes = element_and_lanes(value)[1]
        name = self.spelling[buffer if parameter is None else parameter]
        self.type_of(value)
        if lanes == 1:
            return f"{name}[{self.text(index)}]"
        if parameter is None or type(index).__name__ != "Ramp" or int(index.stride) != 1:
            raise TargetError(f"vectors of {buffer.name} found in a kernel; only runs of a parameter's elements can be")
        known = self._analyzer.modular_set(index.base)
        if known.coeff % lanes or known.base % lanes:
            raise TargetError(f"{lanes} elements of {buffer.name} from {index.base} on found in a kernel; the first "
                              f"index must be a multiple of {lanes}, and be seen to be")
        self.views.add((parameter, lanes))
        return f"{name}_{lanes}[{self.text(tvm.tirx.truncdiv(index.base, lanes))}]"

    def _TensorLoad(self, x: Any) -> str:
        if x.source in self.parameter_of:
            self.read.add(self.parameter_of[x.source])
        return self.element(x.source, x.indices[0], x)

    def _Call(self, x: Any) -> str:
        name = x.op.name.partition(".")[2]
        arguments = list(x.args)
        if name in FUNCTIONS:
            return f"{_FUNCTIONS.get(name, name)}({', '.join(map(self.text, arguments))})"
        writer = getattr(self, f"_call_{name}", None)
        if writer is None:
            raise TargetError(f"a call of {x.op.name} found in a kernel; there is no GLSL for it")
        return str(writer(x, *arguments))

    def _call_if_then_else(self, x: Any, condition: Any, true: Any, false: Any) -> str:
        return f"({self.text(condition)} ? {self.text(true)} : {self.text(false)})"

    def _call_bitwise_and(self, x: Any, a: Any, b: Any) -> str:
        return f"({self.text(a)} & {self.text(b)})"

    def _call_bitwise_or(self, x: Any, a: Any, b: Any) -> str:
        return f"({self.text(a)} | {self.text(b)})"

    def _call_bitwise_xor(self, x: Any, a: Any, b: Any) -> str:
        return f"({self.text(a)} ^ {self.text(b)})"

    def _call_bitwise_not(self, x: Any, a: Any) -> str:
        return f"(~{self.text(a)})"

    def _call_shift_left(self, x: Any, a: Any, b: Any) -> str:
        return f"({self.text(a)} << {self.text(b)})"

    def _call_shift_right(self, x: Any, a: Any, b: Any) -> str:
        return f"({self.text(a)} >> {self.text(b)})"

    def _call_reinterpret(self, x: Any, value: Any) -> str:
        (to, lanes), (of, of_lanes) = element_and_lanes(x), element_and_lanes(value)
        self.type_of(x)
        if (to, of) in _BITS and lanes == of_lanes:
            return f"{_BITS[to, of]}({self.text(value)})"
        if lanes == of_lanes and to.strip("uint") == of.strip("uint"):  # int32 and uint32, for example
            return f"{self.type_of(x)}({self.text(value)})"
        raise TargetError(f"the bits of {of}x{of_lanes} as {to}x{lanes} found in a kernel; there is no GLSL for it")

    def _call_call_pure_extern(self, x: Any, name: Any, *arguments: Any) -> str:
        known = {"half_to_float": _HALF_TO_FLOAT, "dot4_i8": _DOT4_INSTRUCTION if self._packed_dot else _DOT4}
        if name.value not in known:
            raise TargetError(f"a call of {name.value} found in a kernel; known: {', '.join(known)}")
        if known[name.value] is _DOT4_INSTRUCTION:
            self.extensions.add("GL_EXT_spirv_intrinsics")
        self.helpers[name.value] = known[name.value]
        return f"{name.value}({', '.join(map(self.text, arguments))})"
