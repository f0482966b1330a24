"""What the kernels of an artefact for a GPU take, as plain data: threads, memory of a workgroup, registers.

Reads the artefact alone; knows nothing of how it is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflashc.runtime.artefact import GPU_CODE, Artefact
from dflashc.runtime.device.kernels import CODES, load_kernels
from dflashc.runtime.errors import RequestError
from dflashc.targets.cuda.cubin import read_cubin
from dflashc.targets.rocm.code_object import read_code_object


@dataclass(frozen=True)
class _Taken:
    """Registers of a thread, and bytes that it keeps in memory for want of registers."""

    registers: int
    spilled: int


def describe_kernels(artefact: Artefact) -> list[dict[str, Any]]:
    """One row per kernel, those of most registers first; raises `RequestError` for an artefact for CPUs.

    `registers` and `spilled` (bytes) are None for Vulkan, whose drivers decide about them.
    """
    if artefact.manifest.requirements.machine not in CODES:
        raise RequestError(f"{artefact.directory} has a library of kernels for CPUs: --kernels is for GPUs")
    table = load_kernels(artefact)
    launches = Counter(x.kernel for p in artefact.plan.programs.values() for x in p.launches)
    taken = _taken(artefact)
    rows = []
    for kernel in table.kernels.values():
        own = taken.get(kernel.symbol)
        rows.append({
            "name": kernel.symbol, "launches": launches[kernel.symbol], "threads": kernel.threads[0],
            "shared": kernel.shared, "bytes": None if own else kernel.bytes,
            "registers": own and own.registers, "spilled": own and own.spilled})
    return sorted(rows, key=lambda row: (-(row["registers"] or 0), row["name"]))


def _taken(artefact: Artefact) -> Mapping[str, _Taken]:
    """What the code of kernels that share a module says of each."""
    machine = artefact.manifest.requirements.machine
    if machine == "vulkan":
        return {}
    code = (artefact.directory / GPU_CODE).read_bytes()
    if machine == "cuda":
        return {name: _Taken(k.registers, k.stack) for name, k in read_cubin(code).items()}
    return {name: _Taken(k.vector_registers, k.private_bytes) for name, k in read_code_object(code).kernels.items()}
