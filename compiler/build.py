"""The whole build, on one page: a GGUF file in, an artefact out.

Everything that can be refused is refused before a byte of weights is read. Kernels compile in worker processes while
this process packs weights. Knows nothing of the command line.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dflashc.compiler.artefact import new_artefact, write_manifest
from dflashc.compiler.gguf import GgufFile, open_gguf
from dflashc.compiler.lower.weights import RAW, WeightSource, place_weights, write_weights
from dflashc.compiler.models import build_graph, read_model_config
from dflashc.compiler.models.config import ModelConfig
from dflashc.compiler.tokenizer import build_tokenizer
from dflashc.runtime.artefact import KERNELS, PLAN, WEIGHTS, sha256_file
from dflashc.runtime.errors import BuildError
from dflashc.runtime.manifest import Manifest, Source
from dflashc.runtime.plan import Buffer, Plan, Program
from dflashc.targets.context import PackedWeight
from dflashc.targets.registry import find_target

if TYPE_CHECKING:
    import tvm

    from dflashc.targets.base import Target

VERIFY_ROWS = range(1, 17)
PREFILL_ROWS = (64, 256)
CONTEXT_STEP = 256
MAX_CONTEXT = 1 << 20


class Progress(Protocol):
    """Hears how far a build is."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, stage: str, amount: int) -> None: ...


class Silent:
    """Progress that nobody watches."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, stage: str, amount: int) -> None: ...


@dataclass(frozen=True)
class BuildOptions:
    """What the user asked for. `context` in tokens, 0 for the model's own; `dump` receives the IR of every phase."""

    model: Path
    target: str
    output: Path
    context: int = 0
    dump: Path | None = None


@dataclass
class Lowered:
    """A model lowered for a target, before anything is written."""

    gguf: GgufFile
    config: ModelConfig
    target: Target
    sources: dict[str, WeightSource]
    plan: Plan
    requests: dict[str, Any]
    tokenizer: Any
    notes: list[str] = field(default_factory=list)


def build(options: BuildOptions, progress: Progress | None = None) -> Manifest:
    """Build an artefact; returns its manifest. Raises a `DflashError` and leaves nothing half-written."""
    progress = progress or Silent()
    lowered = lower(options)
    with lowered.gguf, new_artefact(options.output) as folder:
        placed = place_weights(lowered.sources.values())
        _compile_and_pack(lowered, folder, placed, progress)
        (folder / PLAN).write_text(json.dumps(lowered.plan.to_json(), separators=(",", ":")))
        lowered.tokenizer.write(folder / "tokenizer")
        manifest = Manifest(
            dflashc=importlib.metadata.version("dflashc"), target=options.target,
            requirements=lowered.target.requirements(), source=_source(lowered.gguf, progress),
            config=dataclasses.asdict(lowered.config), context=lowered.plan.max_context, weights=tuple(placed),
            tokenizer={}, self_test=(), notes=tuple(lowered.notes))
        write_manifest(folder, manifest)
        manifest = dataclasses.replace(manifest, self_test=_record_self_test(folder, progress))
        write_manifest(folder, manifest)
    return manifest


def lower(options: BuildOptions) -> Lowered:
    """Everything up to the plan: reads metadata, norms and frequency tables, and no other weights."""
    target = find_target(options.target)
    target.check_toolchain()
    gguf = open_gguf(options.model)
    config = read_model_config(gguf)
    context = _context(options.context, config)
    tokenizer = build_tokenizer(gguf)
    module = build_graph(gguf, config)
    sources, notes = _weights(module, gguf, config, target)
    packed = {name: s.packed for name, s in sources.items()}
    plan, requests = _plan(module, config, packed, target, context, options.dump)
    return Lowered(gguf, config, target, sources, plan, requests, tokenizer, notes)


def _context(asked: int, config: ModelConfig) -> int:
    """The context capacity, rounded up to whole attention parts."""
    if asked < 0 or asked > min(config.context_length, MAX_CONTEXT):
        raise BuildError(f"a context of {asked} tokens was asked for; the model has {config.context_length}")
    wanted = asked or min(config.context_length, MAX_CONTEXT)
    return -(-wanted // CONTEXT_STEP) * CONTEXT_STEP


def _weights(module: tvm.IRModule, gguf: GgufFile, config: ModelConfig,
             target: Target) -> tuple[dict[str, WeightSource], list[str]]:
    """Sources of all weights that the graph names, in the order of their use."""
    frequencies = {f"rope.{r.name}.frequencies": np.array(r.frequencies) for r in config.ropes}
    sources: dict[str, WeightSource] = {}
    notes: dict[str, None] = {}
    for function in ("decode", "logits"):
        for parameter in module[function].params:
            name = parameter.name
            if name in sources or (name not in gguf.tensors and name not in frequencies):
                continue
            array = frequencies.get(name)
            if array is None and len(gguf.tensors[name].shape) == 1:
                array = gguf.tensors[name].dequantise()
            if array is not None:
                sources[name] = WeightSource(PackedWeight(name, RAW, "", 1, array.size, array.nbytes), array=array)
                continue
            tensor = gguf.tensors[name]
            weight, note = target.describe_weight(name, tensor.type_name, tensor.shape)
            sources[name] = WeightSource(weight, tensor.type_name)
            if note:
                notes[note] = None
    return sources, list(notes)


def _plan(module: tvm.IRModule, config: ModelConfig, packed: dict[str, PackedWeight], target: Target, context: int,
          dump: Path | None) -> tuple[Plan, dict[str, Any]]:
    """Fuse, then lower every program at its number of rows."""
    from dflashc.compiler.lower.program import ARENA, STATE_WORDS, lower_program
    from dflashc.passes.pipeline import optimise

    module = optimise(module, {n: w.format for n, w in packed.items()}, {n: w.form for n, w in packed.items()}, dump)
    most, heads = max(PREFILL_ROWS), max(VERIFY_ROWS)
    row = config.hidden * 4
    kv_row = config.kv_heads * config.head_size * 2
    # "hidden" is what a head reads: rows of "residual", chosen when a run is recorded.
    shared = {b.name: b for b in (
        Buffer("state", "state", STATE_WORDS * 8), Buffer("tokens", "state", most * 4),
        Buffer("residual", "scratch", most * row), Buffer("hidden", "view", most * row),
        Buffer("ids", "output", heads * 4),
        Buffer("logits", "output", heads * config.vocabulary * 4),
        *(Buffer(f"cache.{layer}.{which}", "cache", 0, kv_row) for layer in range(config.layers) for which in "kv"))}
    programs: dict[str, Program] = {}
    requests: dict[str, Any] = {}
    arena = 0
    rules = target.rules()
    for role, rows, output in _roles():
        lowered = lower_program(module[role], role, rows, [output], rules, packed, shared, target.name)
        programs[f"{role}.{rows}"] = lowered.program
        requests |= lowered.requests
        arena = max(arena, lowered.arena_bytes)
    shared[ARENA] = Buffer(ARENA, "scratch", arena)
    plan = Plan(shared, programs, context)
    plan.check()
    return plan, requests


def _roles() -> Iterable[tuple[str, int, str]]:
    """(function, rows, output buffer) of every program."""
    for rows in (*VERIFY_ROWS, *PREFILL_ROWS):
        yield "decode", rows, "residual"
    for rows in VERIFY_ROWS:
        yield "ids", rows, "ids"
        yield "logits", rows, "logits"


def _compile_and_pack(lowered: Lowered, folder: Path, placed: list[Any], progress: Progress) -> None:
    """Compile kernels in worker processes and pack weights here, at the same time."""
    requests = list(lowered.requests.values())
    progress.start("kernels", len(requests))
    progress.start("weights", sum(w.bytes for w in placed))
    failure: list[BaseException] = []

    def compile_kernels() -> None:
        try:
            lowered.target.compile(requests, folder / KERNELS, lambda done: progress.advance("kernels", done))
        except BaseException as error:
            failure.append(error)

    compiler = threading.Thread(target=compile_kernels)
    compiler.start()
    try:
        write_weights(folder / WEIGHTS, lowered.gguf, lowered.sources, placed, lowered.target.pack_rows,
                      lowered.target.row_group, lambda size: progress.advance("weights", size))
    finally:
        compiler.join()
    if failure:
        raise failure[0]


def _source(gguf: GgufFile, progress: Progress) -> Source:
    progress.start("hashing", len(gguf.paths))
    hashes = {}
    for path in gguf.paths:
        hashes[path.name] = sha256_file(path)
        progress.advance("hashing", 1)
    return Source(gguf.get_str("general.name", default=gguf.paths[0].stem), gguf.get_str("general.architecture"),
                  hashes, gguf.size)


def _record_self_test(folder: Path, progress: Progress) -> tuple[Any, ...]:
    """Run the fresh artefact on fixed prompts; nothing where this machine cannot run it."""
    from dflashc.runtime.artefact import check_machine, load_artefact
    from dflashc.runtime.errors import ArtefactError
    from dflashc.runtime.selftest import record

    artefact = load_artefact(folder)
    try:
        check_machine(artefact.manifest)
    except ArtefactError:
        return ()
    progress.start("self-test", 1)
    result = record(artefact)
    progress.advance("self-test", 1)
    return result
