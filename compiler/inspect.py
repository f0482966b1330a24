"""What a GGUF file, an artefact, a plan or a target is, as plain data for tables and JSON.

Reads headers and manifests alone; knows nothing of how they are shown.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.errors import BuildError, DflashError, GgufError, RequestError, TargetError
from dflashc.runtime.plan import Launch, Operand, Plan, Program, Units

if TYPE_CHECKING:
    from dflashc.compiler.build import Lowered

_SHORT_ARRAY = 16
_LAYER = re.compile(r"blk\.\d+")


def describe_gguf(path: Path) -> dict[str, Any]:
    """Metadata, tensors and, where the architecture is supported, the configuration of a GGUF model.

    Raises `GgufError` only for what cannot be read at all: unknown architectures and tensor types are described too.
    """
    from dflashc.compiler.gguf import open_gguf

    with open_gguf(path) as gguf:
        config, unsupported = _config(gguf)
        return {
            "files": [str(p) for p in gguf.paths],
            "bytes": gguf.size,
            "gguf_version": gguf.version,
            "architecture": gguf.get_str("general.architecture", default=None),
            "unsupported": unsupported,
            "config": config,
            "metadata": {key: _value(gguf, key) for key in gguf.metadata},
            "types": _totals((t.type_name, math.prod(t.shape), t.nbytes) for t in gguf.tensors.values()),
            "tensors": [{"name": t.name, "type": t.type_name, "shape": list(t.shape), "bytes": t.nbytes}
                        for t in gguf.tensors.values()],
        }


def describe_artefact(path: Path, context: int | None = None) -> dict[str, Any]:
    """Origin, requirements, configuration, weights, memory at `context` tokens (its own when left out), programs."""
    artefact = load_artefact(path)
    manifest, plan = artefact.manifest, artefact.plan
    if context is not None and not 1 <= context <= plan.max_context:
        raise RequestError(f"a context of {context} tokens was asked for; this artefact has 1 to {plan.max_context}")
    return {
        "directory": str(path),
        "bytes": sum(f.bytes for f in manifest.files.values()),
        "dflashc": manifest.dflashc,
        "target": manifest.target,
        "requirements": dataclasses.asdict(manifest.requirements),
        "sources": [dataclasses.asdict(source) for source in manifest.sources],
        "drafter": manifest.drafter,
        "config": manifest.config,
        "max_context": plan.max_context,
        "context": context or plan.max_context,
        "memory": {"weights": sum(w.bytes for w in manifest.weights), **plan.memory(context or plan.max_context)},
        "types": _totals((w.format, w.rows * w.columns, w.bytes) for w in manifest.weights),
        "tensors": [{"name": w.name, "type": w.format, "shape": [w.rows, w.columns], "bytes": w.bytes}
                    for w in manifest.weights],
        "files": {name: f.bytes for name, f in manifest.files.items()},
        "programs": describe_programs(plan),
        "self_tests": len(manifest.self_test),
        "notes": list(manifest.notes),
    }


def describe_lowered(lowered: Lowered) -> dict[str, Any]:
    """What a build would write: weights, memory at the full context, programs, kernels."""
    plan = lowered.plan
    weights = [source.packed for source in lowered.sources.values()]
    return {
        "pair": lowered.pair.to_json() if lowered.pair else None,
        "target": lowered.target.name,
        "requirements": dataclasses.asdict(lowered.target.requirements()),
        "config": dataclasses.asdict(lowered.config),
        "context": plan.max_context,
        "memory": {"weights": sum(w.bytes for w in weights), **plan.memory(plan.max_context)},
        "types": _totals((w.format, w.rows * w.columns, w.bytes) for w in weights),
        "kernels": len(lowered.requests),
        "programs": describe_programs(plan),
        "notes": lowered.notes,
    }


def describe_programs(plan: Plan) -> list[dict[str, Any]]:
    """One row per program: launches, barriers, launches per layer, weight bytes read, arithmetic operations."""
    return [{
        "name": name,
        "launches": len(program.launches),
        "barriers": sum(x.barrier for x in program.launches),
        "launches_per_layer": _launches_per_layer(program),
        "bytes_read": sum(x.bytes_read for x in program.launches),
        "flops": sum(x.flops for x in program.launches),
    } for name, program in plan.programs.items()]


def describe_program(plan: Plan, name: str) -> list[dict[str, Any]]:
    """The launches of a program, in order; raises `RequestError` for a program that the plan does not have."""
    program = plan.programs.get(name)
    if program is None:
        raise RequestError(f"no program {name!r} in the plan; it has {', '.join(plan.programs)}")
    return [_launch(x) for x in program.launches]


def describe_targets() -> list[dict[str, Any]]:
    """Every target: the level it stands for, what keeps this machine from building for it, and from running it."""
    from dflashc.targets.cpu.target import names
    from dflashc.targets.cpu.traits import host_features
    from dflashc.targets.registry import find_target

    try:
        host = host_features()
    except TargetError:
        host = frozenset()
    described = []
    for name in names():
        target = find_target(name)
        need = target.requirements()
        described.append({
            "name": name,
            "level": need.level,
            "features": list(need.features),
            "cannot_build": _refusal(target.check_toolchain),
            "missing_to_run": sorted(set(need.features) - host),
        })
    return described


def _config(gguf: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The model's configuration, or why there is none."""
    from dflashc.compiler.models import read_model_config

    try:
        return dataclasses.asdict(read_model_config(gguf)), None
    except (BuildError, GgufError) as error:
        return None, str(error)


def _value(gguf: Any, key: str) -> Any:
    """A metadata value; long arrays as their type, length and beginning."""
    try:
        value = gguf.metadata[key]
    except GgufError as error:
        return {"unreadable": str(error)}
    if not isinstance(value, np.ndarray | list):
        return value
    first = list(value[:_SHORT_ARRAY]) if isinstance(value, list) else value[:_SHORT_ARRAY].tolist()
    if len(value) <= _SHORT_ARRAY:
        return first
    return {"type": gguf.metadata.fields[key].type_name, "count": len(value), "first": first}


def _totals(tensors: Iterable[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Tensors, elements and bytes by type, the largest first."""
    totals: dict[str, list[int]] = {}
    for kind, elements, nbytes in tensors:
        total = totals.setdefault(kind, [0, 0, 0])
        total[:] = total[0] + 1, total[1] + elements, total[2] + nbytes
    ordered = sorted(totals.items(), key=lambda item: -item[1][2])
    return [{"type": kind, "tensors": n, "elements": e, "bytes": b} for kind, (n, e, b) in ordered]


def _launches_per_layer(program: Program) -> list[int]:
    """Fewest and most launches from one layer's first to the next one's; operations of layer i begin with "blk.<i>"."""
    first: dict[str, int] = {}
    for index, launch in enumerate(program.launches):
        if layer := _LAYER.match(launch.operation):
            first.setdefault(layer[0], index)
    counts = [end - start for start, end in pairwise([*first.values(), len(program.launches)])]
    return [min(counts), max(counts)] if counts else []


def _launch(launch: Launch) -> dict[str, Any]:
    return {"operation": launch.operation, "kernel": launch.kernel, "units": _units(launch.units),
            "grain": launch.grain, "barrier": launch.barrier, "bytes_read": launch.bytes_read, "flops": launch.flops,
            "operands": [_operand(o) for o in launch.operands]}


def _units(units: Units) -> str:
    if not units.divisor:
        return str(units.multiple)
    length = f"(n + {units.addend})" if units.addend else "n"
    return f"{units.multiple} * ceil({length} / {units.divisor})"


def _operand(operand: Operand) -> str:
    if operand.kind in ("weight", "buffer"):
        return f"{operand.name} + {operand.value:.0f}" if operand.value else operand.name
    return operand.kind if operand.kind == "context" else f"{operand.value:g}"


def _refusal(check: Any) -> str:
    try:
        check()
    except DflashError as error:
        return str(error)
    return ""
