"""Which programs a model or a pair consists of, at which rows, and the buffers they meet in.

Roles: `positions` (rope tables, once per run), `decode` (target), `ids` and `logits` (its heads), `draw` (the sampler),
`accept`, and for a pair `inject`, `draft` and `propose` (or `weigh`, see `compiler.drafter.graph`). A round of width m
is positions, draft, propose, decode, ids (or logits and draw), inject, accept, all at m + 1 rows, `propose` at m; a
plain step is a round of width 0. Knows no kernel and no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax

from dflashc.compiler.drafter.config import PREFIX, DrafterConfig
from dflashc.compiler.lower.caches import Caches
from dflashc.compiler.lower.program import ARENA, LoweredProgram, Lowering
from dflashc.compiler.models.config import ModelConfig
from dflashc.passes import operators as op
from dflashc.runtime.artefact import CONFIDENCE
from dflashc.runtime.device_sampling import Word
from dflashc.runtime.plan import Buffer, Operand, Plan, Program
from dflashc.targets.context import PackedWeight, Parts, Rule

VERIFY_ROWS = range(1, 17)
PREFILL_ROWS = (64, 256)
MOST_ROWS = max(PREFILL_ROWS)
MOST_HEAD_ROWS = max(VERIFY_ROWS)
STATE_WORDS = 8
CANDIDATES, PROBABILITIES = "proposals.candidates", "proposals.probabilities"
"""Buffers for the laws that `propose` of version 2 draws from."""


@dataclass(frozen=True)
class _Job:
    """A program to lower."""

    role: str
    rows: int
    parameters: Mapping[str, Parts] = field(default_factory=dict)
    outputs: tuple[Parts, ...] = ()


@dataclass(frozen=True)
class LoweredPlan:
    """The plan, and the kernels it calls by symbol."""

    plan: Plan
    requests: dict[str, Any]


def lower_programs(module: tvm.IRModule, config: ModelConfig, drafter: DrafterConfig | None,
                   weights: Mapping[str, PackedWeight], caches: Caches, rules: Mapping[str, Rule], target: str,
                   context: int, full_rows: bool = False) -> LoweredPlan:
    """Lower all programs of an optimised module.

    Parameters
    ----------
    drafter : DrafterConfig or None
        Of the pair; None for a model alone.
    context : int
        Context capacity in tokens.
    full_rows : bool
        Whether every draft runs the whole block and keeps its first rows, see `pair.Overrides.draft_rows`.
    """
    buffers = {b.name: b for b in (*_buffers(module, config, drafter), *caches.buffers)}
    lowering = Lowering(target, rules, weights, caches.by_name, buffers)
    programs: dict[str, Program] = {}
    requests: dict[str, Any] = {}
    adjacent: list[list[str]] = []
    arena = 0
    jobs = [*_model_jobs(module, drafter), *_choice_jobs(drafter)]
    jobs += _pair_jobs(drafter, full_rows) if drafter else []
    for job in jobs:
        lowered: LoweredProgram = lowering.lower(module[job.role], job.role, job.rows, job.parameters, job.outputs)
        programs[f"{job.role}.{job.rows}"] = lowered.program
        requests |= lowered.requests
        adjacent += [names for names in lowered.adjacent if names not in adjacent]
        arena = max(arena, lowered.arena_bytes)
    buffers[ARENA] = Buffer(ARENA, "scratch", arena)
    plan = Plan(buffers, programs, context, tuple(tuple(names) for names in adjacent))
    plan.check()
    return LoweredPlan(plan, requests)


def choice_functions(vocabulary: int, candidates: int = 0) -> tvm.IRModule:
    """The Relax functions that end a round, each of one call: `draw` and `accept`, see `operators`.

    Parameters
    ----------
    candidates : int
        Tokens that a drafter gives probabilities, so that `draw` can judge by them; 0 where none are given.
    """
    rows, context = tvm.tirx.Var("m", "int64"), tvm.tirx.Var("context", "int64")
    tokens, ids, block = (relax.Var(n, relax.TensorType((rows,), "int32")) for n in ("tokens", "ids", "block"))
    history = relax.Var("history", relax.TensorType((context,), "int32"))
    state = relax.Var("state", relax.TensorType((STATE_WORDS,), "int64"))
    sampling = relax.Var("sampling", relax.TensorType((len(Word),), "int64"))
    logits = relax.Var("logits", relax.TensorType((rows, vocabulary), "float32"))
    laws = [relax.Var(name, relax.TensorType((MOST_HEAD_ROWS, candidates), dtype))
            for name, dtype in ((CANDIDATES, "int32"), (PROBABILITIES, "float64"))] if candidates else []
    module = tvm.IRModule()
    draw = [logits, tokens, state, history, sampling, *laws]
    for name, operator, parameters in (("draw", op.judge if laws else op.draw, draw),
                                       ("accept", op.accept, [tokens, ids, state, block, history])):
        builder = relax.BlockBuilder()
        with builder.function(name, parameters):
            with builder.dataflow():
                result = builder.emit_output(operator(*parameters))
            builder.emit_func_output(result)
        module[name] = builder.get()[name].without_attr("global_symbol")
    return module


def most_width(drafter: DrafterConfig) -> int:
    """The widest draft: what the block was trained for and the verify programs can take."""
    return min(drafter.block_size, MOST_HEAD_ROWS) - 1


def _buffers(module: tvm.IRModule, config: ModelConfig, drafter: DrafterConfig | None) -> Iterator[Buffer]:
    row = config.hidden * 4
    yield Buffer("state", "state", STATE_WORDS * 8)
    yield Buffer("tokens", "state", MOST_ROWS * 4)
    yield Buffer("block", "state", MOST_HEAD_ROWS * 4)
    yield Buffer("history", "state", 0, 4)
    yield Buffer("sampling", "state", len(Word) * 8)
    yield Buffer("residual", "scratch", MOST_ROWS * row)
    # "hidden" is what a head reads: rows of "residual", chosen when a run is recorded.
    yield Buffer("hidden", "view", MOST_ROWS * row)
    yield Buffer("ids", "output", MOST_HEAD_ROWS * 4)
    yield Buffer("logits", "output", MOST_HEAD_ROWS * config.vocabulary * 4)
    yield Buffer("emitted", "output", (MOST_HEAD_ROWS + 1) * 4)
    for name, table in zip(_table_names(module), module["positions"].ret_ty.fields, strict=True):
        yield Buffer(name, "scratch", 2 * MOST_ROWS * int(table.shape.values[2]) * 4)
    if drafter is None:
        return
    yield Buffer(f"{PREFIX}residual", "scratch", MOST_HEAD_ROWS * drafter.hidden * 4)
    for index, part in enumerate(_feature_types(module)):
        row = int(part.shape.values[1]) * np.dtype(str(part.dtype)).itemsize
        yield Buffer(f"features.{index}", "scratch", MOST_ROWS * row)
    yield Buffer(CONFIDENCE, "output", MOST_HEAD_ROWS * 4)
    if drafter.selector_top_k:
        yield Buffer(CANDIDATES, "state", MOST_HEAD_ROWS * drafter.selector_top_k * 4)
        yield Buffer(PROBABILITIES, "state", MOST_HEAD_ROWS * drafter.selector_top_k * 8)


def _feature_types(module: tvm.IRModule) -> list[relax.TensorType]:
    """The parts of the form in which `inject` takes the features."""
    (parameter,) = (p for p in module["inject"].params if p.name == "features")
    return list(parameter.ty.fields) if isinstance(parameter.ty, relax.TupleType) else [parameter.ty]


def _table_names(module: tvm.IRModule) -> list[str]:
    frequencies = [p.name for p in module["positions"].params if p.name.endswith(".frequencies")]
    return sorted(name.removesuffix(".frequencies") for name in frequencies)


def _features(module: tvm.IRModule) -> Parts:
    parts: list[Parts] = [Operand("buffer", f"features.{i}") for i in range(len(_feature_types(module)))]
    return parts if len(parts) > 1 else parts[0]


def _model_jobs(module: tvm.IRModule, drafter: DrafterConfig | None) -> Iterator[_Job]:
    residual: Parts = Operand("buffer", "residual")
    outputs = (residual, _features(module)) if drafter else (residual,)
    tables: tuple[Parts, ...] = tuple(Operand("buffer", name) for name in _table_names(module))
    for rows in (*VERIFY_ROWS, *PREFILL_ROWS):
        yield _Job("positions", rows, outputs=tables)
        yield _Job("decode", rows, outputs=outputs)
        if drafter:
            yield _Job("inject", rows, parameters={"features": _features(module)})
    for rows in VERIFY_ROWS:
        yield _Job("ids", rows, outputs=(Operand("buffer", "ids"),))
        yield _Job("logits", rows, outputs=(Operand("buffer", "logits"),))


def _choice_jobs(drafter: DrafterConfig | None) -> Iterator[_Job]:
    for rows in VERIFY_ROWS:
        yield _Job("draw", rows, outputs=(Operand("buffer", "ids"),))
    for rows in range(1, (most_width(drafter) if drafter else 0) + 2):
        yield _Job("accept", rows, outputs=(Operand("buffer", "emitted"),))


def _pair_jobs(drafter: DrafterConfig, full_rows: bool) -> Iterator[_Job]:
    residual = Operand("buffer", f"{PREFIX}residual")
    block_rows = most_width(drafter) + 1
    for rows in [block_rows] if full_rows else range(2, block_rows + 1):
        yield _Job("draft", rows, outputs=(residual,))
    # the proposals are the rows after the anchor's, and go where the target reads them
    hidden = {"hidden": Operand("buffer", residual.name, drafter.hidden * 4)}
    ids: list[Parts] = [Operand("buffer", "tokens", 4)]
    confidence: list[Parts] = [Operand("buffer", CONFIDENCE)]
    laws: list[Parts] = [Operand("buffer", CANDIDATES), Operand("buffer", PROBABILITIES)]
    outputs = {"propose": ids, "weigh": ids + confidence} if drafter.version == 1 else {
        "propose": ids + confidence + laws}
    for role, parts in outputs.items():
        for width in range(1, block_rows):
            yield _Job(role, width, parameters=hidden, outputs=(parts if len(parts) > 1 else parts[0],))
