"""An artefact on disk: found, checked against this machine, and its parts handed out.

An artefact is a directory: `manifest.json`, `plan.json`, the kernels, `weights.bin`, and the tokenizer's files. Knows
nothing of how it was built, and of devices only which kernels they take.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dflashc.runtime.errors import ArtefactError
from dflashc.runtime.manifest import Manifest, Weight, load_manifest
from dflashc.runtime.plan import Plan, load_plan
from dflashc.runtime.rounds import all_round_programs

PLAN, WEIGHTS = "plan.json", "weights.bin"
KERNELS = "kernels.so"
"""Kernels for CPUs."""
GPU_KERNELS, GPU_CODE, GPU_PTX = "kernels.json", "kernels.bin", "kernels.ptx"
"""Kernels for GPUs: how they are called, their code, and for CUDA the same for later devices."""
WEIGHT_ALIGNMENT = 64  # bytes

_BUFFERS = {"state", "tokens", "block", "history", "sampling", "residual", "hidden", "ids", "logits", "emitted"}
"""That a session reads or writes by name."""
CONFIDENCE = "proposals.confidence"
"""The buffer for how sure the drafter is of each proposal."""


@dataclass(frozen=True)
class Artefact:
    """A loaded artefact; weights stay on disk until a device maps them."""

    directory: Path
    manifest: Manifest
    plan: Plan

    @property
    def kernels(self) -> Path:
        return self.directory / KERNELS

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS


def load_artefact(directory: Path) -> Artefact:
    """Read manifest and plan and check that every file has its size. Raises `ArtefactError`."""
    manifest = load_manifest(directory)
    for name, file in manifest.files.items():
        path = directory / name
        if name.startswith("/") or ".." in Path(name).parts or not path.is_file():
            raise ArtefactError(f"{directory}: file {name} is missing; build the artefact again")
        if path.stat().st_size != file.bytes:
            raise ArtefactError(f"{path} has {path.stat().st_size:,} bytes, {file.bytes:,} expected; "
                                "build the artefact again")
    for required in (PLAN, WEIGHTS, *kernel_files(manifest)):
        if required not in manifest.files:
            raise ArtefactError(f"{directory}: the manifest does not list {required}; build the artefact again")
    end = manifest.files[WEIGHTS].bytes
    for weight in manifest.weights:
        if weight.offset < 0 or weight.bytes < 0 or weight.offset + weight.bytes > end:
            raise ArtefactError(f"weight {weight.name} reaches past the end of {WEIGHTS}; build the artefact again")
    plan = load_plan(directory / PLAN)
    _check_together(manifest, plan)
    return Artefact(directory, manifest, plan)


def kernel_files(manifest: Manifest) -> tuple[str, ...]:
    """The files of an artefact that hold its kernels."""
    gpu = (GPU_KERNELS, GPU_CODE)
    return {"vulkan": gpu, "rocm": gpu, "cuda": (*gpu, GPU_PTX)}.get(manifest.requirements.machine, (KERNELS,))


def _check_together(manifest: Manifest, plan: Plan) -> None:
    """Raise `ArtefactError` unless the plan finds its weights and has all that a session asks for, in its sizes."""
    counts = {key: manifest.drafter.get(key, 0) for key in ("width", "block_rows", "candidates")}
    for key, count in counts.items():
        if type(count) is not int or not 0 <= count <= len(plan.programs):
            raise ArtefactError(f"the manifest gives {count!r} for {key}: build the artefact again")
    width = counts["width"]
    programs, buffers = all_round_programs(**counts), _BUFFERS | ({CONFIDENCE} if width else set())
    for program in plan.programs.values():
        if program.role == "decode":
            programs |= {f"positions.{program.rows}", *([f"inject.{program.rows}"] if width else [])}
    for what, missing in (("program", programs - plan.programs.keys()), ("buffer", buffers - plan.buffers.keys())):
        if missing:
            raise ArtefactError(f"the plan has no {what} {min(missing)!r}: another version of dflashc wrote it; "
                                "build the artefact again")
    weights = {w.name: w.bytes for w in manifest.weights}
    operands = (o for p in plan.programs.values() for x in p.launches for o in x.operands if o.kind == "weight")
    for operand in operands:
        if not 0 <= operand.value <= weights.get(operand.name, -1):
            raise ArtefactError(f"the plan names weight {operand.name!r} at {operand.value}, which the manifest does "
                                "not have: build the artefact again")
    placed = {w.name: w for w in manifest.weights}
    for names in plan.adjacent:
        for before, name in pairwise(names):
            if not {before, name} <= placed.keys() or not 0 <= _gap(placed[before], placed[name]) < WEIGHT_ALIGNMENT:
                raise ArtefactError(f"weight {name!r} does not follow {before!r}, as the plan has it: build the "
                                    "artefact again")
    for key, buffer in (("vocabulary", "logits"), ("hidden", "residual")):
        value, most = manifest.config.get(key), plan.buffers[buffer].bytes
        if type(value) is not int or not 0 < 4 * value <= most:
            raise ArtefactError(f"the manifest gives {value!r} for {key}, the plan has {most:,} bytes of {buffer}: "
                                "build the artefact again")


def _gap(before: Weight, after: Weight) -> int:
    """Bytes between two weights."""
    return after.offset - before.offset - before.bytes


def verify_hashes(artefact: Artefact) -> None:
    """Hash every file of the artefact; raises `ArtefactError` naming the first that differs."""
    for name, file in artefact.manifest.files.items():
        if sha256_file(artefact.directory / name) != file.sha256:
            raise ArtefactError(f"{artefact.directory / name} does not have the SHA-256 that the manifest gives: "
                                "it was changed or damaged; build the artefact again")


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
