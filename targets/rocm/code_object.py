"""What an AMDGPU code object says of its kernels: processor, arguments, registers, spills.

The metadata note is a MessagePack map, see "Code Object V5 Metadata" in LLVM's AMDGPU usage guide
(llvm.org/docs/AMDGPUUsage.html); the part of MessagePack that it uses is read here. Knows nothing of how it was made.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from dflashc.runtime.errors import TargetError
from dflashc.targets.elf import read_elf

_EM_AMDGPU = 224
_METADATA_NOTE = ("AMDGPU", 32)


@dataclass(frozen=True)
class KernelRecord:
    """A kernel of a code object.

    Attributes
    ----------
    arguments : tuple of (kind, offset, bytes)
        Kinds as in the metadata: "global_buffer", "by_value", "hidden_…".
    private_bytes : int
        Memory per thread for what does not fit in registers.
    """

    name: str
    arguments: tuple[tuple[str, int, int], ...]
    kernarg_bytes: int
    shared_bytes: int
    private_bytes: int
    most_threads: int
    wavefront: int
    vector_registers: int
    scalar_registers: int
    spills: int


@dataclass(frozen=True)
class CodeObject:
    """A code object: its version, its processor as "gfx1151", its kernels by name."""

    version: int
    target: str
    kernels: dict[str, KernelRecord]


def read_code_object(data: bytes) -> CodeObject:
    """Raises `TargetError` for anything but a whole AMDGPU code object with metadata."""
    elf = read_elf(data)
    note = elf.notes().get(_METADATA_NOTE)
    if elf.machine != _EM_AMDGPU or note is None:
        raise TargetError(f"ELF machine {elf.machine} found, {_EM_AMDGPU} (AMDGPU) with metadata expected")
    try:
        metadata = _MessagePack(note).value()
        kernels = {k[".name"]: _record(k) for k in metadata["amdhsa.kernels"]}
        return CodeObject(elf.abi_version + 2, metadata["amdhsa.target"].rpartition("-")[2], kernels)
    except (KeyError, TypeError, IndexError, struct.error) as error:
        raise TargetError(f"the code object's metadata is damaged: {type(error).__name__} {error}") from error


def _record(k: dict[str, Any]) -> KernelRecord:
    arguments = tuple((a[".value_kind"], a[".offset"], a[".size"]) for a in k.get(".args", ()))
    return KernelRecord(k[".name"], arguments, k[".kernarg_segment_size"], k[".group_segment_fixed_size"],
                        k[".private_segment_fixed_size"], k[".max_flat_workgroup_size"], k[".wavefront_size"],
                        k[".vgpr_count"], k[".sgpr_count"], k[".vgpr_spill_count"] + k[".sgpr_spill_count"])


class _MessagePack:
    """Reads one value; types by their first byte, msgpack.org's specification."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self) -> Any:
        first = self._number("B")
        if first <= 0x7F or first >= 0xE0:
            return first if first <= 0x7F else first - 0x100
        if first <= 0x8F:
            return self._map(first & 0x0F)
        if first <= 0x9F:
            return self._list(first & 0x0F)
        if first <= 0xBF:
            return self._string(first & 0x1F)
        if first in (0xC2, 0xC3):
            return first == 0xC3
        if first == 0xC0:
            return None
        if first in _NUMBERS:
            return self._number(_NUMBERS[first])
        if first in _SIZED:
            size, read = _SIZED[first]
            return read(self, self._number(size))
        raise TypeError(f"type {first:#x}")

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(f">{form}", self._data, self._at)
        self._at += struct.calcsize(form)
        return number

    def _string(self, size: int) -> str:
        self._at += size
        return self._data[self._at - size : self._at].decode()

    def _list(self, size: int) -> list[Any]:
        return [self.value() for _ in range(size)]

    def _map(self, size: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(size)}


_NUMBERS = dict(zip(range(0xCA, 0xD4), "fdBHIQbhiq", strict=True))
_SIZED: dict[int, tuple[str, Any]] = {
    0xD9: ("B", _MessagePack._string), 0xDA: ("H", _MessagePack._string), 0xDB: ("I", _MessagePack._string),
    0xDC: ("H", _MessagePack._list), 0xDD: ("I", _MessagePack._list),
    0xDE: ("H", _MessagePack._map), 0xDF: ("I", _MessagePack._map),
}
