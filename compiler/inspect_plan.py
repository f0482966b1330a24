"""What the programs and rounds of a plan do, as plain data: launches, barriers, bytes, arithmetic.

Reads plans and manifests alone; knows nothing of how they are shown, nor of kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from dflashc.compiler.drafter.config import INJECTED, PREFIX
from dflashc.runtime.artefact import Artefact
from dflashc.runtime.errors import RequestError
from dflashc.runtime.kv_types import kv_bytes
from dflashc.runtime.manifest import Manifest, Weight
from dflashc.runtime.plan import Launch, Operand, Plan, Program, Units
from dflashc.runtime.rounds import round_programs

_LAYER = re.compile(r"(drafter\.)?blk\.(\d+)")
"""Begins the operations of a layer of the drafter or the target."""
_PHASES = {"decode": "verify"}
"""What a role is called in a round, where that is not its own name."""
_MODELS = {"drafter": ("draft", "propose", "inject"), "target": ("decode", "ids")}
"""Roles by the model that they are part of."""


def describe_programs(plan: Plan) -> list[dict[str, Any]]:
    """One row per program: launches, barriers, both per layer, weight bytes read, arithmetic operations."""
    return [{"name": name, "role": program.role, "rows": program.rows, **_totals(program.launches),
             **_per_layer(program)} for name, program in plan.programs.items()]


def describe_program(plan: Plan, name: str) -> list[dict[str, Any]]:
    """The launches of a program, in order; raises `RequestError` for a program that the plan does not have."""
    program = plan.programs.get(name)
    if program is None:
        raise RequestError(f"no program {name!r} in the plan; it has {', '.join(plan.programs)}")
    return [_launch(x) for x in program.launches]


def describe_rounds(artefact: Artefact) -> list[dict[str, Any]]:
    """One row per width, a plain step being a round of width 0. `least` is what `bytes_read` would be at best."""
    return [{"name": f"round.{width}", "width": width, **_totals(launches), "least": _least_bytes(artefact, programs)}
            for width, programs, launches in _rounds(artefact)]


def describe_round(artefact: Artefact, name: str, depth: int) -> dict[str, Any]:
    """A greedy round launch by launch, totals by phase, and the bytes read beside the least that could be.

    Parameters
    ----------
    name : str
        "round.<width>".
    depth : int
        Tokens whose K and V are read.

    Returns
    -------
    dict
        `bytes_read` counts matrices, `cache_bytes` K and V, both as often as launches read them. `least` and
        `least_cache` count once what each model uses: the drafter must be done before the target begins, so a matrix
        that both share is read twice at best.

    Raises
    ------
    RequestError
        A width that the artefact has no programs for.
    """
    found = {f"round.{width}": (width, programs) for width, programs, _ in _rounds(artefact)}
    if name not in found:
        raise RequestError(f"no {name!r} in the plan; it has round.0 to round.{len(found) - 1}")
    width, programs = found[name]
    launches = [{"program": program, **_launch(x), "cache_bytes": _cache_bytes(x, artefact, depth)}
                for program in programs for x in artefact.plan.programs[program].launches]
    by_role = {artefact.plan.programs[p].role: artefact.plan.programs[p] for p in programs}
    return {
        "name": name, "width": width, "depth": depth,
        "layers": {model: _per_layer(by_role[roles[0]]) for model, roles in _MODELS.items() if roles[0] in by_role},
        "phases": list(_phases(launches)),
        "bytes_read": sum(x["bytes_read"] for x in launches), "least": _least_bytes(artefact, programs),
        "cache_bytes": sum(x["cache_bytes"] for x in launches),
        "least_cache": sum(cache_bytes(artefact.manifest, model, depth) for model in artefact.manifest.kv_types
                           if _MODELS[model][0] in by_role),
        "launches": launches,
    }


def _rounds(artefact: Artefact) -> Iterator[tuple[int, list[str], list[Launch]]]:
    """Every width with its programs and their launches."""
    drafter, plan = artefact.manifest.drafter, artefact.plan
    ending = ("ids", "inject", "accept") if drafter else ("ids", "accept")
    for width in range(drafter.get("width", 0) + 1):
        programs = round_programs(width, drafter.get("block_rows", 0), *ending)
        yield width, programs, [x for name in programs for x in plan.programs[name].launches]


def _phases(launches: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Sums by phase, in order."""
    phases: dict[str, list[Mapping[str, Any]]] = {}
    for launch in launches:
        role = launch["program"].partition(".")[0]
        phases.setdefault(_PHASES.get(role, role), []).append(launch)
    for phase, members in phases.items():
        sums = {key: sum(x[key] for x in members) for key in ("bytes_read", "cache_bytes", "flops")}
        yield {"phase": phase, "launches": len(members), "barriers": sum(x["barrier"] for x in members), **sums}


def _totals(launches: Sequence[Launch]) -> dict[str, int]:
    return {"launches": len(launches), "barriers": sum(x.barrier for x in launches),
            "bytes_read": sum(x.bytes_read for x in launches), "flops": sum(x.flops for x in launches)}


def _per_layer(program: Program) -> dict[str, list[int]]:
    """Fewest and most launches, and barriers, from one layer's first launch to the next one's.

    Empty where no layer has a next one.
    """
    first: dict[str, int] = {}
    for index, launch in enumerate(program.launches):
        if layer := _LAYER.match(launch.operation):
            first.setdefault(layer[0], index)
    layers = [program.launches[start:end] for start, end in pairwise(first.values())]
    counts = {"launches_per_layer": [len(x) for x in layers],
              "barriers_per_layer": [sum(y.barrier for y in x) for x in layers]}
    return {key: [min(values), max(values)] if values else [] for key, values in counts.items()}


# Bytes ---------------------------------------------------------------------------------------------------------


def _least_bytes(artefact: Artefact, programs: Iterable[str]) -> int:
    """Bytes of the matrices that the drafter uses in `programs`, and of those that the target uses, each once.

    The injection's own copy of the K and V projections counts as the original.
    """
    weights = artefact.manifest.weights
    places = {w.name: i for i, w in enumerate(weights)}
    total = 0
    for roles in _MODELS.values():
        used = {weights[i].name.replace(INJECTED, PREFIX): weights[i].bytes
                for name in programs if (program := artefact.plan.programs[name]).role in roles
                for launch in program.launches for i in _matrices(launch, weights, places)}
        total += sum(used.values())
    return total


def _matrices(launch: Launch, weights: Sequence[Weight], places: Mapping[str, int]) -> list[int]:
    """Places among `weights` of the matrices that a launch reads.

    It names all of them or, where several lie side by side, the first: then the bytes it reads tell how many they are.
    """
    named = [i for o in launch.operands if o.kind == "weight" and weights[i := places[o.name]].rows > 1]
    if not launch.bytes_read or not named:
        return []
    taken, total = list(named), sum(weights[i].bytes for i in named)
    while total < launch.bytes_read:
        taken.append(taken[-1] + 1)
        total += weights[taken[-1]].bytes
    return taken


def _cache_bytes(launch: Launch, artefact: Artefact, depth: int) -> int:
    """Bytes of K and V that a launch of a round reads at `depth`.

    A launch of a layer that names caches is its attention; the injection, which writes, is of no single layer.
    """
    layer = _LAYER.match(launch.operation)
    caches = any(o.kind == "buffer" and artefact.plan.buffers[o.name].role == "cache" for o in launch.operands)
    if layer is None or not caches:
        return 0
    return _layer_cache_bytes(artefact.manifest, "drafter" if layer[1] else "target", int(layer[2]), depth)


def cache_bytes(manifest: Manifest, model: str, depth: int) -> int:
    """Bytes of K and V that the windows of the "target"'s or the "drafter"'s layers show of `depth` tokens."""
    layers = len(_config(manifest, model)["layer_windows"])
    return sum(_layer_cache_bytes(manifest, model, layer, depth) for layer in range(layers))


def _config(manifest: Manifest, model: str) -> Mapping[str, Any]:
    config: Mapping[str, Any] = manifest.config if model == "target" else manifest.drafter["pair"]["config"]
    return config


def _layer_cache_bytes(manifest: Manifest, model: str, layer: int, depth: int) -> int:
    config = _config(manifest, model)
    window = config["layer_windows"][layer] or depth
    return min(depth, window) * 2 * kv_bytes(manifest.kv_types[model], config["kv_heads"] * config["head_size"])


# Launches ------------------------------------------------------------------------------------------------------


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
