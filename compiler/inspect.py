"""What a GGUF file, an artefact or a target is, as plain data for tables and JSON.

Reads headers and manifests alone; knows nothing of how they are shown. Plans are described in `inspect_plan`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflashc.compiler.inspect_plan import describe_programs, describe_rounds
from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.errors import BuildError, GgufError, PairError, RequestError, TargetError

if TYPE_CHECKING:
    from dflashc.compiler.build import Lowered
    from dflashc.compiler.gguf import GgufFile
    from dflashc.runtime.device.survey import Survey
    from dflashc.runtime.manifest import Requirements
from dflashc.runtime.plan import DRAFTER, Plan

_SHORT_ARRAY = 16


def describe_gguf(path: Path) -> dict[str, Any]:
    """Metadata, tensors and, where it is supported, the configuration of a GGUF model or drafter.

    Raises `GgufError` only for what cannot be read at all: unknown architectures and tensor types are described too.
    """
    from dflashc.compiler.gguf import open_gguf

    with open_gguf(path) as gguf:
        config, drafter, unsupported = _config(gguf)
        return {
            "files": [str(p) for p in gguf.paths],
            "bytes": gguf.size,
            "gguf_version": gguf.version,
            "architecture": gguf.get_str("general.architecture", default=None),
            "unsupported": unsupported,
            "config": config,
            "drafter": drafter,
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
        "kv_types": manifest.kv_types,
        "rings": _rings(plan),
        "config": manifest.config,
        "max_context": plan.max_context,
        "context": context or plan.max_context,
        "memory": {"weights": sum(w.bytes for w in manifest.weights), **plan.memory(context or plan.max_context)},
        "types": _totals((w.format, w.rows * w.columns, w.bytes) for w in manifest.weights),
        "tensors": [{"name": w.name, "type": w.format, "shape": [w.rows, w.columns], "bytes": w.bytes}
                    for w in manifest.weights],
        "files": {name: f.bytes for name, f in manifest.files.items()},
        "programs": describe_programs(plan),
        "rounds": describe_rounds(artefact),
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
        "kv_types": lowered.kv_types,
        "rings": _rings(plan),
        "context": plan.max_context,
        "memory": {"weights": sum(w.bytes for w in weights), **plan.memory(plan.max_context)},
        "types": _totals((w.format, w.rows * w.columns, w.bytes) for w in weights),
        "kernels": len(lowered.requests),
        "programs": describe_programs(plan),
        "notes": lowered.notes,
    }


def describe_targets(surveys: Iterable[Survey]) -> list[dict[str, Any]]:
    """Every target: the level it stands for, what keeps this machine from building for it, and from running it.

    Parameters
    ----------
    surveys : iterable
        The GPUs of this machine.
    """
    from dflashc.targets.cpu.traits import host_features
    from dflashc.targets.registry import find_target, target_names

    try:
        host = host_features()
    except TargetError:
        host = frozenset()
    found = {survey.machine: survey for survey in surveys}
    described = []
    for name in target_names():
        target = find_target(name)
        need = target.requirements()
        described.append({
            "name": name,
            "machine": need.machine,
            "level": need.level,
            "features": list(need.features),
            "cannot_build": "; ".join(target.missing()),
            "missing_to_run": (_no_gpu(found[need.machine], need) if need.machine in found
                               else sorted(set(need.features) - host)),
        })
    return described


def _no_gpu(survey: Survey, need: Requirements) -> list[str]:
    """Why no GPU runs what has these requirements; empty where one does."""
    from dflashc.runtime.device.opening import gpu_module, refusal

    kind = gpu_module(survey.machine)
    reasons = [(gpu.name, refusal(kind, gpu, need)) for gpu in survey.gpus]
    if survey.missing or not all(reason for _, reason in reasons):
        return [survey.missing] if survey.missing else []
    return [f"{name} {reason}" for name, reason in reasons]


def describe_devices(surveys: Iterable[Survey]) -> dict[str, Any]:
    """The GPUs of this machine, numbered as `--device` takes them, and why there are none of a kind.

    What each offers by name is left out: it is hundreds of names.
    """
    devices: list[dict[str, Any]] = []
    missing = {}
    for survey in surveys:
        for number, gpu in enumerate(survey.gpus):
            described = dataclasses.asdict(gpu)
            del described["features"]
            devices.append({"machine": survey.machine, "number": number, **described})
        if survey.missing:
            missing[survey.machine] = survey.missing
    return {"devices": devices, "missing": missing}


def _rings(plan: Plan) -> list[dict[str, Any]]:
    """Windows of the target's and the drafter's layers, and what their caches hold, in tokens."""
    found = {("drafter" if b.name.startswith(DRAFTER) else "target", b.window, b.slots)
             for b in plan.buffers.values() if b.slots}
    return [{"model": model, "window": window, "slots": slots} for model, window, slots in sorted(found, reverse=True)]


def _config(gguf: GgufFile) -> tuple[dict[str, Any] | None, dict[str, Any] | None, str | None]:
    """The model's configuration, or the drafter's with all that is told of it, or why there is neither."""
    from dflashc.compiler.drafter import is_drafter, normalise
    from dflashc.compiler.models import read_model_config

    try:
        if is_drafter(gguf.get_str("general.architecture")):
            drafter = normalise(gguf)
            return None, {**drafter.to_json(), "summary": drafter.describe()}, None
        return dataclasses.asdict(read_model_config(gguf)), None, None
    except (BuildError, GgufError, PairError) as error:
        return None, None, str(error)


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
