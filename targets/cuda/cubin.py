"""What a cubin says of its kernels: registers, shared memory, and memory for what registers do not hold.

The attributes are those of the ELF sections `.nv.info` and `.nv.shared.<kernel>`; their numbers (EIATTR_REGCOUNT,
EIATTR_FRAME_SIZE) are listed by NVIDIA's `cuobjdump -elf`. Knows nothing of how it was made.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dflashc.runtime.errors import TargetError
from dflashc.targets.elf import read_elf

_EM_CUDA = 190
_REGISTERS, _FRAME_SIZE = 0x2F, 0x11
_SIZED = 4
"""The format of an attribute whose value has a length of its own; all others have two bytes of value."""


@dataclass(frozen=True)
class KernelRecord:
    """A kernel of a cubin.

    Attributes
    ----------
    stack : int
        Bytes of local memory per thread: spilled registers, and arrays that are indexed at run time.
    """

    registers: int
    shared_bytes: int
    stack: int


def read_cubin(data: bytes) -> dict[str, KernelRecord]:
    """The kernels by name. Raises `TargetError` for anything but a whole cubin."""
    elf = read_elf(data)
    if elf.machine != _EM_CUDA:
        raise TargetError(f"ELF machine {elf.machine} found, {_EM_CUDA} (CUDA) expected")
    shared = {s.name.removeprefix(".nv.shared."): s.size for s in elf.sections if s.name.startswith(".nv.shared.")}
    found: dict[str, dict[int, int]] = {}
    for section in elf.sections:
        if section.name != ".nv.info":
            continue
        for attribute, symbol, value in _attributes(section.data):
            found.setdefault(elf.symbols[symbol], {})[attribute] = value
    names = [s.name.removeprefix(".text.") for s in elf.sections if s.name.startswith(".text.")]
    try:
        return {n: KernelRecord(found[n][_REGISTERS], shared.get(n, 0), found[n][_FRAME_SIZE]) for n in names}
    except KeyError as error:
        raise TargetError(f"the cubin does not say what {error} needs") from error


def _attributes(data: bytes) -> list[tuple[int, int, int]]:
    """(attribute, symbol, value) of those that say something of a symbol."""
    found, at = [], 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != _SIZED:
            continue
        if attribute in (_REGISTERS, _FRAME_SIZE):
            found.append((attribute, *struct.unpack_from("<II", data, at)))
        at += size
    return found
