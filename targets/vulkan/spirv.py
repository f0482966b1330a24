"""A SPIR-V module as words: what it needs of a device, and the two things that GLSL cannot say about float arithmetic.

Numbers from the SPIR-V specification 1.6 (registry.khronos.org/SPIR-V). Knows nothing of GLSL and of tools.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from dflashc.runtime.errors import TargetError

_MAGIC = 0x07230203
_HEADER = 5  # words: magic, version, generator, bound, schema

_CAPABILITY, _EXECUTION_MODE, _DECORATE, _ENTRY_POINT, _TYPE_FLOAT = 17, 16, 71, 15, 22
_CONVERT, _STORE, _LAST_ANNOTATION = 115, 62, 80
_FLOAT_OPERATIONS = frozenset({127, 129, 131, 133, 136, 142, 148, *range(180, 192)})
"""OpFNegate, OpFAdd, OpFSub, OpFMul, OpFDiv, OpVectorTimesScalar, OpDot, and the comparisons of floats."""
_NO_CONTRACTION, _ROUNDING, _TO_NEAREST_EVEN = 42, 39, 0
_PRESERVE_CAPABILITY, _PRESERVE_MODE = 4466, 4461  # of signed zeros, infinities and NaN

_FEATURES = {
    1: "", 9: "shaderFloat16", 10: "shaderFloat64", 11: "shaderInt64", 22: "shaderInt16", 39: "shaderInt8",
    4433: "storageBuffer16BitAccess", 4434: "uniformAndStorageBuffer16BitAccess", 4448: "storageBuffer8BitAccess",
    4449: "uniformAndStorageBuffer8BitAccess", _PRESERVE_CAPABILITY: "shaderSignedZeroInfNanPreserveFloat32",
    6018: "VK_KHR_shader_integer_dot_product", 6019: "VK_KHR_shader_integer_dot_product",
}
"""What a device must have, by capability: a feature, a property or an extension; nothing for what every device has."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode and operand words (result type and result id among them)."""

    opcode: int
    operands: tuple[int, ...]

    @property
    def words(self) -> tuple[int, ...]:
        return ((len(self.operands) + 1) << 16 | self.opcode, *self.operands)


def instructions(code: bytes) -> Iterator[Instruction]:
    """The instructions of a module. Raises `TargetError` for bytes that are none."""
    words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
    if len(code) % 4 or len(words) < _HEADER or words[0] != _MAGIC:
        raise TargetError("the GLSL compiler's output is no SPIR-V module")
    at = _HEADER
    while at < len(words):
        size = words[at] >> 16
        if size == 0 or at + size > len(words):
            raise TargetError(f"the SPIR-V module is damaged at word {at}")
        yield Instruction(words[at] & 0xFFFF, words[at + 1 : at + size])
        at += size


def with_exact_floats(code: bytes) -> bytes:
    """The module with float results that depend on nothing but the source expression.

    - NoContraction on all arithmetic and comparisons: no driver fuses or reorders it in one kernel and not in another.
      What shall be fused is an explicit `fma`.
    - SignedZeroInfNanPreserve for float32: infinities and NaN are values, not assumptions.
    - FPRoundingMode RTE on conversions to float16 that are stored; Vulkan allows it on no others.
    """
    body = list(instructions(code))
    widths = {i.operands[0]: i.operands[1] for i in body if i.opcode == _TYPE_FLOAT}
    entry = next(i.operands[1] for i in body if i.opcode == _ENTRY_POINT)
    marks: list[tuple[int, ...]] = []
    marks += [(i.operands[1], _NO_CONTRACTION) for i in body if i.opcode in _FLOAT_OPERATIONS]
    halves = {i.operands[1] for i in body if i.opcode == _CONVERT and widths.get(i.operands[0]) == 16}
    marks += [(half, _ROUNDING, _TO_NEAREST_EVEN) for half in sorted(halves - _used_elsewhere(body, halves))]
    preserves = 32 in widths.values()
    out: list[Instruction] = []
    decorated = False
    for position, instruction in enumerate(body):
        if instruction.opcode == _DECORATE and not decorated:
            out += [Instruction(_DECORATE, mark) for mark in marks]
            decorated = True
        out.append(instruction)
        if preserves and instruction.opcode == _CAPABILITY and body[position + 1].opcode != _CAPABILITY:
            out.append(Instruction(_CAPABILITY, (_PRESERVE_CAPABILITY,)))
        if preserves and instruction.opcode == _ENTRY_POINT:
            out.append(Instruction(_EXECUTION_MODE, (entry, _PRESERVE_MODE, 32)))
    return _assemble(code[: 4 * _HEADER], out)


def _used_elsewhere(body: Sequence[Instruction], results: Container[int]) -> set[int]:
    """Those of `results` that any instruction but a store of them may use; literals are taken for uses."""
    used: set[int] = set()
    for i in body:
        if i.opcode > _LAST_ANNOTATION:
            used.update(o for o in i.operands[2:] if o in results)
        elif i.opcode == _STORE:
            used.update(o for o in i.operands[:1] if o in results)
    return used


def _assemble(header: bytes, body: Sequence[Instruction]) -> bytes:
    words = [word for instruction in body for word in instruction.words]
    return header + struct.pack(f"<{len(words)}I", *words)


def required_features(code: bytes) -> frozenset[str]:
    """Features, properties and extensions that a device must have to run the module, by Vulkan's names.

    Raises `TargetError` for a capability that no kernel may need, subgroup operations among them.
    """
    found: set[str] = set()
    for instruction in instructions(code):
        if instruction.opcode == _CAPABILITY:
            (capability,) = instruction.operands
            if capability not in _FEATURES:
                raise TargetError(f"SPIR-V capability {capability} found in a kernel; expected one of "
                                  f"{', '.join(map(str, _FEATURES))}")
            found.add(_FEATURES[capability])
    return frozenset(found - {""})
