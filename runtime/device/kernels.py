"""`kernels.json` of an artefact for GPUs: what `kernels.bin` holds, and how each kernel is called.

A kernel's parameters are the operands of its launches: buffers in order, then scalars in order, as 4-byte words. On
Vulkan buffers are bound in set 0 from 0 on, and scalars are push constants; CUDA and HIP take pointers, then scalars.
Plain data, written by the compiler; knows nothing of drivers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflashc.runtime.artefact import GPU_CODE, GPU_KERNELS, Artefact
from dflashc.runtime.errors import ArtefactError
from dflashc.runtime.plan import Launch, Operand

VERSION = 1
GPU_ABI = 1
"""How kernels are called and launches are split, as this module tells it."""

CODES = {"vulkan": "spirv", "cuda": "cubin", "rocm": "hsaco"}
"""What `kernels.bin` holds, by machine: one SPIR-V module per kernel, or one module with all of them."""

SCALAR_BYTES = 128
"""Scalars of a kernel at most: what every Vulkan device has for push constants."""

_MOST_BYTES = 64 << 20
_KINDS = {"weight": "buffer", "buffer": "buffer", "i64": "i32", "context": "i32", "f32": "f32"}


@dataclass(frozen=True)
class Kernel:
    """A kernel of an artefact.

    Attributes
    ----------
    threads : tuple of int
        Threads of a workgroup along x, y and z.
    shared : int
        Bytes of shared memory that it declares.
    operands : tuple of str
        "buffer", "i32" or "f32", in order.
    offset, bytes : int
        Its code in `kernels.bin`.
    """

    symbol: str
    threads: tuple[int, int, int]
    shared: int
    operands: tuple[str, ...]
    offset: int
    bytes: int

    @property
    def buffers(self) -> int:
        return self.operands.count("buffer")

    @property
    def scalar_bytes(self) -> int:
        return 4 * (len(self.operands) - self.buffers)


@dataclass(frozen=True)
class KernelTable:
    """Kernels by symbol, and the file that holds their code."""

    code: str
    kernels: Mapping[str, Kernel]
    path: Path

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, "code": self.code, "kernels": {
            k.symbol: {"threads": list(k.threads), "shared": k.shared, "operands": list(k.operands),
                       "offset": k.offset, "bytes": k.bytes} for k in self.kernels.values()}}

    @staticmethod
    def from_json(document: Any, path: Path) -> KernelTable:
        """Raises `ArtefactError` for another version, and for missing, unknown or ill-typed fields."""
        try:
            if document["version"] != VERSION:
                raise ArtefactError(f"kernel table version {document['version']!r} found, {VERSION} expected: "
                                    "build again")
            kernels = {symbol: _kernel(symbol, **entry) for symbol, entry in document["kernels"].items()}
            return KernelTable(str(document["code"]), kernels, path)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtefactError(f"the kernel table is damaged ({type(error).__name__}: {error}): "
                                "build again") from error

    def kernel(self, symbol: str) -> Kernel:
        """Raises `ArtefactError` for one that is not there."""
        try:
            return self.kernels[symbol]
        except KeyError:
            raise ArtefactError(f"the artefact lacks kernel {symbol}: build again") from None

    def read(self, kernel: Kernel) -> bytes:
        """The code of a kernel."""
        with self.path.open("rb") as file:
            file.seek(kernel.offset)
            code = file.read(kernel.bytes)
        if len(code) != kernel.bytes:
            raise ArtefactError(f"{self.path} ends within kernel {kernel.symbol}: build again")
        return code


def load_kernels(artefact: Artefact) -> KernelTable:
    """The kernel table of an artefact, checked against its code file, its machine and its plan."""
    need = artefact.manifest.requirements
    if need.abi != GPU_ABI:
        raise ArtefactError(f"the artefact's kernels have calling version {need.abi}, {GPU_ABI} expected: build again")
    table_path, code_path = (artefact.directory / name for name in (GPU_KERNELS, GPU_CODE))
    try:
        if table_path.stat().st_size > _MOST_BYTES:
            raise ArtefactError(f"{table_path} has more than {_MOST_BYTES:,} bytes: build again")
        document = json.loads(table_path.read_bytes())
        size = code_path.stat().st_size
    except (OSError, ValueError) as error:
        raise ArtefactError(f"cannot read the kernels of {artefact.directory}: {error}") from error
    table = KernelTable.from_json(document, code_path)
    if table.code != CODES[need.machine]:
        raise ArtefactError(f"{code_path} holds {table.code!r}, a {need.machine} artefact needs {CODES[need.machine]}: "
                            "build again")
    for kernel in table.kernels.values():
        if kernel.offset + kernel.bytes > size:
            raise ArtefactError(f"kernel {kernel.symbol} reaches past the end of {code_path}: build again")
    for program in artefact.plan.programs.values():
        for launch in program.launches:
            for symbol in (launch.kernel, *(s for _, s in launch.variants)):
                check_launch(launch, table.kernel(symbol))
    return table


def check_launch(launch: Launch, kernel: Kernel) -> None:
    """Raise `ArtefactError` unless a launch passes what its kernel takes, and its work does not grow with the text."""
    passed = tuple(_KINDS.get(o.kind, o.kind) for o in launch.operands)
    if passed != kernel.operands:
        raise ArtefactError(f"kernel {kernel.symbol} takes ({', '.join(kernel.operands)}), its launch "
                            f"{launch.operation!r} passes ({', '.join(passed)}): build again")
    if launch.units.divisor or launch.units.multiple < 1:
        raise ArtefactError(f"launch {launch.operation!r} of kernel {kernel.symbol} has {launch.units}, expected a "
                            "fixed number of workgroups from 1: build again")


def scalar_word(operand: Operand, context: int) -> bytes:
    """A scalar operand as its 4 bytes: int32, or float32."""
    if operand.kind == "f32":
        return np.float32(operand.value).tobytes()
    value = context if operand.kind == "context" else int(operand.value)
    if not -1 << 31 <= value < 1 << 31:
        raise ArtefactError(f"the plan passes {value} to a kernel, which takes 32-bit numbers: build again")
    return np.int32(value).tobytes()


def _kernel(symbol: str, threads: Any, shared: Any, operands: Any, offset: Any, bytes: Any) -> Kernel:
    sizes = [*threads, offset, bytes, shared]
    if len(threads) != 3 or not all(type(n) is int and n >= 0 for n in sizes) or min(threads) < 1:
        raise ValueError(f"sizes of kernel {symbol}")
    if not all(kind in ("buffer", "i32", "f32") for kind in operands):
        raise ValueError(f"operands of kernel {symbol}")
    kernel = Kernel(symbol, (threads[0], threads[1], threads[2]), shared, tuple(operands), offset, bytes)
    if kernel.scalar_bytes > SCALAR_BYTES:
        raise ValueError(f"{kernel.scalar_bytes} bytes of scalars of kernel {symbol}, at most {SCALAR_BYTES} expected")
    return kernel
