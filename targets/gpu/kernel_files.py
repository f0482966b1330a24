"""Writes the files in which a GPU artefact's kernels lie, as `runtime.device.kernels` reads them. Knows no device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dflashc.runtime.artefact import GPU_CODE, GPU_KERNELS
from dflashc.runtime.device.kernels import Kernel, KernelTable

_ALIGNMENT = 16  # bytes: of a module in the file


def write_modules(folder: Path, code: str, kernels: Iterable[tuple[Kernel, bytes]]) -> None:
    """Write kernels that have a module each."""
    placed = []
    with (folder / GPU_CODE).open("wb") as file:
        for kernel, module in kernels:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            placed.append(replace(kernel, offset=file.tell(), bytes=len(module)))
            file.write(module)
    _write_table(folder, code, placed)


def write_module(folder: Path, code: str, kernels: Iterable[Kernel], module: bytes) -> None:
    """Write kernels that share one module."""
    (folder / GPU_CODE).write_bytes(module)
    _write_table(folder, code, [replace(kernel, offset=0, bytes=len(module)) for kernel in kernels])


def _write_table(folder: Path, code: str, kernels: Sequence[Kernel]) -> None:
    table = KernelTable(code, {k.symbol: k for k in kernels}, folder / GPU_CODE)
    (folder / GPU_KERNELS).write_text(json.dumps(table.to_json(), separators=(",", ":")))
