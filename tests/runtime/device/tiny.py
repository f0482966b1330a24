"""A tiny artefact for GPUs: three kernels and a program whose result NumPy knows.

`run` scales x into y, adds weight a to it, adds the neighbours b and c as one, and copies the beginning to `emitted`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflashc.runtime.artefact import GPU_CODE, GPU_KERNELS, GPU_PTX, WEIGHTS, Artefact
from dflashc.runtime.device.kernels import CODES, GPU_ABI, Kernel, KernelTable
from dflashc.runtime.manifest import Manifest, Requirements, Weight
from dflashc.runtime.plan import Buffer, Launch, Operand, Plan, Program, Units

COUNT = 1000  # elements
NEIGHBOURS = 48  # elements of b, and of c
EMITTED = 16
FACTOR = 1.5
GROUP = 64  # threads

KERNELS = {
    "scale": ("buffer", "f32", "buffer", "i32"),  # x, factor, y, count
    "add": ("buffer", "i32", "buffer"),  # weight, count, y
    "copy": ("buffer", "buffer", "i32"),  # y, emitted, count
}
"""Operands by symbol."""

BUFFERS = (Buffer("x", "state", 4 * COUNT), Buffer("y", "scratch", 4 * COUNT),
           Buffer("emitted", "output", 4 * EMITTED), Buffer("cache", "cache", 0, 64))


def _buffer(name: str) -> Operand:
    return Operand("buffer", name)


def _launch(kernel: str, elements: int, *operands: Operand, barrier: bool = True) -> Launch:
    return Launch(kernel, kernel, Units(-(-elements // GROUP)), 1, operands, barrier)


PROGRAM = (
    _launch("scale", COUNT, _buffer("x"), Operand("f32", "", FACTOR), _buffer("y"), Operand("i64", "", COUNT)),
    _launch("add", COUNT, Operand("weight", "a"), Operand("i64", "", COUNT), _buffer("y")),
    _launch("add", 2 * NEIGHBOURS, Operand("weight", "b"), Operand("i64", "", 2 * NEIGHBOURS), _buffer("y")),
    _launch("copy", EMITTED, _buffer("y"), _buffer("emitted"), Operand("i64", "", EMITTED)),
)


@dataclass(frozen=True)
class Weights:
    """The weights as arrays, float32."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray


def weights() -> Weights:
    random = np.random.default_rng(7)
    return Weights(*(random.standard_normal(n).astype(np.float32) for n in (COUNT, NEIGHBOURS, NEIGHBOURS)))


def expected(x: np.ndarray) -> np.ndarray:
    """What y holds after a run."""
    known = weights()
    y = x * np.float32(FACTOR) + known.a
    y[: 2 * NEIGHBOURS] += np.concatenate([known.b, known.c])
    return y


def write_tiny(folder: Path, requirements: Requirements, code: Mapping[str, bytes] | bytes) -> Artefact:
    """The artefact in `folder`, without manifest and plan files.

    Parameters
    ----------
    code : bytes, or bytes by kernel
        One module for all kernels, or one for each.
    """
    folder.mkdir(exist_ok=True)
    placed, data = [], b""
    for name, array in vars(weights()).items():
        placed.append(Weight(name, "raw", 1, array.size, len(data), array.nbytes))
        data += array.tobytes() + bytes(-array.nbytes % 64)
    (folder / WEIGHTS).write_bytes(data)
    _write_kernels(folder, requirements.machine, code)
    manifest = Manifest(dflashc="", target="tiny", requirements=requirements, sources=(), config={}, drafter={},
                        kv_types={}, context=1024, weights=tuple(placed), self_test=(), notes=())
    plan = Plan({b.name: b for b in BUFFERS}, {"run.1": Program("run", 1, PROGRAM)}, 1024, (("b", "c"),))
    return Artefact(folder, manifest, plan)


def _write_kernels(folder: Path, machine: str, code: Mapping[str, bytes] | bytes) -> None:
    blob, kernels = b"", {}
    for symbol, operands in KERNELS.items():
        own = code if isinstance(code, bytes) else code[symbol]
        offset = 0 if isinstance(code, bytes) else len(blob)
        blob = own if isinstance(code, bytes) else blob + own
        kernels[symbol] = Kernel(symbol, (GROUP, 1, 1), 0, operands, offset, len(own))
    table = KernelTable(CODES[machine], kernels, folder / GPU_CODE)
    (folder / GPU_CODE).write_bytes(blob)
    (folder / GPU_KERNELS).write_text(json.dumps(table.to_json()))
    (folder / GPU_PTX).write_bytes(b"ptx:" + blob)


def gpu_requirements(machine: str, level: str = "generic", features: tuple[str, ...] = ()) -> Requirements:
    return Requirements(machine, level, features, GPU_ABI)
