"""GLSL's spelling of TIR types, literals and names, and the language extensions that types need.

Knows nothing of statements and expressions.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection
from typing import Any

from dflashc.runtime.errors import TargetError

_SCALARS = {
    "bool": "bool", "int8": "int8_t", "uint8": "uint8_t", "int16": "int16_t", "uint16": "uint16_t", "int32": "int",
    "uint32": "uint", "int64": "int64_t", "uint64": "uint64_t", "float16": "float16_t", "float32": "float",
    "float64": "double",
}
_VECTORS = {
    "int8": "i8vec", "uint8": "u8vec", "int16": "i16vec", "uint16": "u16vec", "int32": "ivec", "uint32": "uvec",
    "int64": "i64vec", "uint64": "u64vec", "float16": "f16vec", "float32": "vec", "float64": "dvec",
}
_EXTENSIONS = {
    "int8": ("GL_EXT_shader_explicit_arithmetic_types_int8", "GL_EXT_shader_8bit_storage"),
    "uint8": ("GL_EXT_shader_explicit_arithmetic_types_int8", "GL_EXT_shader_8bit_storage"),
    "int16": ("GL_EXT_shader_explicit_arithmetic_types_int16", "GL_EXT_shader_16bit_storage"),
    "uint16": ("GL_EXT_shader_explicit_arithmetic_types_int16", "GL_EXT_shader_16bit_storage"),
    "int64": ("GL_EXT_shader_explicit_arithmetic_types_int64",),
    "uint64": ("GL_EXT_shader_explicit_arithmetic_types_int64",),
    "float16": ("GL_EXT_shader_explicit_arithmetic_types_float16", "GL_EXT_shader_16bit_storage"),
}
_MOST_LANES = 4


def element_and_lanes(value: Any) -> tuple[str, int]:
    """("float32", 4) for an expression, variable or buffer of float32x4."""
    element, _, lanes = str(value.ty.dtype).partition("x")
    return element, int(lanes or 1)


def spell(element: str, lanes: int = 1) -> str:
    """The GLSL type. Raises `TargetError` for one that GLSL does not have."""
    if lanes == 1 and element in _SCALARS:
        return _SCALARS[element]
    if 1 < lanes <= _MOST_LANES and element in _VECTORS:
        return f"{_VECTORS[element]}{lanes}"
    raise TargetError(f"type {element}x{lanes} found in a kernel; GLSL has vectors of 2 to {_MOST_LANES} numbers")


def extensions_of(element: str) -> Collection[str]:
    """The GLSL extensions that values of this type need."""
    return _EXTENSIONS.get(element, ())


def integer_literal(value: int, element: str) -> str:
    if element == "bool":
        return "true" if value else "false"
    if element == "uint32":
        return f"{value}u"
    if element in ("int64", "uint64"):
        return f"{spell(element)}({value & (1 << 64) - 1:#x}ul)"
    if element == "int32":
        return str(value) if value > -(1 << 31) else "int(0x80000000u)"
    return f"{spell(element)}({value})"


def float_literal(value: float, element: str) -> str:
    """Decimal where that names the value exactly, so that sources stay readable; its bits otherwise."""
    if element == "float64":
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        words = f"uvec2({bits & 0xFFFFFFFF:#x}u, {bits >> 32:#x}u)"
        return f"{value!r}lf" if _is_short(value) else f"packDouble2x32({words})"
    single = struct.unpack("<f", struct.pack("<f", value))[0] if math.isfinite(value) else value
    bits = struct.unpack("<I", struct.pack("<f", single))[0]
    text = repr(single) if _is_short(single) else f"uintBitsToFloat({bits:#x}u)"
    return text if element == "float32" else f"{spell(element)}({text})"


def _is_short(value: float) -> bool:
    return math.isfinite(value) and len(repr(value)) <= 10 and "e" not in repr(value)


class Names:
    """Identifiers, each given out once. The prefix keeps them apart from every word of GLSL."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}

    def new(self, hint: str) -> str:
        name = re.sub(r"[\W_]+", "_", f"v_{hint}").rstrip("_")
        count = self._given[name] = self._given.get(name, 0) + 1
        return name if count == 1 else self.new(f"{hint}_{count}")
