"""The whole build, on one page: a GGUF model or pair in, an artefact out.

Everything that can be refused is refused before a byte of weights is read. Kernels compile in worker processes while
this process packs weights. Knows nothing of the command line.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dflashc.compiler.artefact import new_artefact, write_manifest
from dflashc.compiler.drafter import normalise
from dflashc.compiler.drafter.config import INJECTED, PREFIX
from dflashc.compiler.gguf import GgufFile, GgufTensor, open_gguf
from dflashc.compiler.lower.weights import RAW, WeightSource, place_weights, write_weights
from dflashc.compiler.models import build_graph, check_model, read_model_config
from dflashc.compiler.models.config import ModelConfig
from dflashc.compiler.models.tensor_list import stays_plain
from dflashc.compiler.pair import Overrides, PairReport, check_pair
from dflashc.compiler.self_test import read_other, recorded_here, taken_over
from dflashc.compiler.tokenizer import TokenizerFiles, build_tokenizer
from dflashc.runtime.artefact import PLAN, WEIGHTS, sha256_file
from dflashc.runtime.errors import BuildError
from dflashc.runtime.manifest import Manifest, Requirements, Source
from dflashc.runtime.plan import CONTEXT_STEP, Plan
from dflashc.targets.base import check_toolchain
from dflashc.targets.context import PackedWeight
from dflashc.targets.registry import find_target

if TYPE_CHECKING:
    import tvm

    from dflashc.targets.base import Target

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
    """What the user asked for.

    Attributes
    ----------
    drafter : Path, optional
        A drafter for the model; giving one means that the artefact speculates.
    context : int
        Capacity in tokens, 0 for the model's own.
    kv_type, drafter_kv_type : str
        Types of the K and V caches, "f16" or "q8_0".
    self_test_of : Path, optional
        For a GPU: an artefact of the same model for a CPU, whose recorded self-test is taken over.
    dump : Path, optional
        Receives the IR of every phase.
    """

    model: Path
    target: str
    output: Path
    drafter: Path | None = None
    overrides: Overrides = field(default_factory=Overrides)
    context: int = 0
    kv_type: str = "f16"
    drafter_kv_type: str = "f16"
    self_test_of: Path | None = None
    dump: Path | None = None

    @property
    def kv_types(self) -> dict[str, str]:
        """Types of the caches by model, as in the manifest."""
        return {"target": self.kv_type} | ({"drafter": self.drafter_kv_type} if self.drafter else {})


@dataclass
class Lowered:
    """A model or a pair lowered for a target, before anything is written.

    Attributes
    ----------
    files : list of GgufFile
        The target's and, of a pair, the drafter's.
    sources : dict
        Weights by parameter name, in the order in which they are stored.
    kv_types : dict
        As in the manifest.
    tested : Manifest, optional
        Of the artefact whose self-test is taken over.
    """

    files: list[GgufFile]
    config: ModelConfig
    pair: PairReport | None
    target: Target
    kv_types: dict[str, str]
    sources: dict[str, WeightSource]
    plan: Plan
    requests: dict[str, Any]
    tokenizer: TokenizerFiles
    notes: list[str]
    tested: Manifest | None

    def close(self) -> None:
        for file in self.files:
            file.close()


def build(options: BuildOptions, progress: Progress | None = None) -> Manifest:
    """Build an artefact; returns its manifest. Raises a `DflashError` and leaves nothing half-written."""
    progress = progress or Silent()
    lowered = lower(options)
    with closing(lowered), new_artefact(options.output) as folder:
        placed = place_weights(lowered.sources.values())
        requirements = _compile_and_pack(lowered, folder, placed, progress)
        (folder / PLAN).write_text(json.dumps(lowered.plan.to_json(), separators=(",", ":")))
        lowered.tokenizer.write(folder / "tokenizer")
        manifest = Manifest(
            dflashc=importlib.metadata.version("dflashc"), target=options.target,
            requirements=requirements, sources=_sources(lowered.files, progress),
            config=dataclasses.asdict(lowered.config), drafter=_drafter(lowered.pair),
            kv_types=lowered.kv_types, context=lowered.plan.max_context, weights=tuple(placed), self_test=(),
            notes=tuple(lowered.notes))
        write_manifest(folder, manifest)
        tests = taken_over(lowered.tested, manifest) if lowered.tested else recorded_here(folder, progress)
        manifest = dataclasses.replace(manifest, self_test=tests)
        write_manifest(folder, manifest)
    return manifest


def lower(options: BuildOptions) -> Lowered:
    """Everything up to the plan: reads metadata, norms and frequency tables, and no other weights."""
    from dflashc.compiler.lower.caches import plan_caches
    from dflashc.compiler.lower.programs import MOST_ROWS, choice_functions, lower_programs
    from dflashc.passes.pipeline import optimise

    target = find_target(options.target)
    check_toolchain(target)
    tested = None
    if options.self_test_of is not None:
        tested = read_other(options.self_test_of, target.requirements(), options.kv_type)
    gguf = open_gguf(options.model)
    config = read_model_config(gguf)
    context = _context(options.context, config)
    tokenizer = build_tokenizer(gguf)
    files, tensors, pair, drafter_graph = [gguf], dict(gguf.tensors), None, None
    if options.drafter is None:
        said = check_model(gguf, config)
    else:
        pair, drafter_file, drafter_tensors, drafter_graph = _read_drafter(options, gguf, config)
        files.append(drafter_file)
        tensors |= drafter_tensors
        said = [*pair.notes, *pair.warnings]
    drafter = pair.config if pair else None
    caches = plan_caches(target, config, options.kv_type, drafter, options.drafter_kv_type, context, MOST_ROWS)
    module = build_graph(gguf, config, pair.config.taps if pair else ())
    if drafter_graph is not None:
        module.update(drafter_graph)
    module.update(choice_functions(config.vocabulary, pair.config.selector_top_k if pair else 0))
    sources, notes = _weights(module, tensors, config, pair, target)
    packed = {name: s.packed for name, s in sources.items()}
    module = optimise(module, {n: w.format for n, w in packed.items()}, {n: w.form for n, w in packed.items()},
                      options.dump)
    programs = lower_programs(module, config, drafter, packed, caches, target.rules(), target.name, context,
                              options.overrides.draft_rows == "full")
    sources = _ordered(sources, programs.plan.adjacent)
    return Lowered(files, config, pair, target, options.kv_types, sources, programs.plan, programs.requests, tokenizer,
                   [*notes, *said], tested)


def _read_drafter(options: BuildOptions, gguf: GgufFile,
                  config: ModelConfig) -> tuple[PairReport, GgufFile, dict[str, GgufTensor], tvm.IRModule]:
    """The checked pair, the drafter's file, its tensors under their parameter names, and its graph."""
    from dflashc.compiler.drafter.graph import drafter_module
    from dflashc.compiler.drafter.tables import fit_tables

    assert options.drafter is not None
    file = open_gguf(options.drafter)
    drafter = normalise(file)
    report = check_pair(gguf, config, file, drafter, options.overrides)
    fitted, tensors = fit_tables(report.config, drafter.tensors, config.vocabulary)
    graph = drafter_module(fitted, tensors, gguf.tensors)
    named = {prefix + name: tensor for prefix in (PREFIX, INJECTED) for name, tensor in tensors.items()}
    return report, file, named, graph


def _drafter(pair: PairReport | None) -> dict[str, Any]:
    """What the runtime needs to know of the drafter; empty without one."""
    if pair is None:
        return {}
    from dflashc.compiler.lower.programs import most_width

    width = most_width(pair.config)
    return {"width": width, "block_rows": width + 1 if pair.overrides.draft_rows == "full" else 0,
            "mask_id": pair.config.mask_id, "candidates": pair.config.selector_top_k, "pair": pair.to_json()}


def _context(asked: int, config: ModelConfig) -> int:
    """The context capacity, rounded up to whole attention parts."""
    if asked < 0 or asked > min(config.context_length, MAX_CONTEXT):
        raise BuildError(f"a context of {asked} tokens was asked for; the model has {config.context_length}")
    wanted = asked or min(config.context_length, MAX_CONTEXT)
    return -(-wanted // CONTEXT_STEP) * CONTEXT_STEP


def _weights(module: tvm.IRModule, tensors: dict[str, GgufTensor], config: ModelConfig, pair: PairReport | None,
             target: Target) -> tuple[dict[str, WeightSource], list[str]]:
    """Sources of all weights that the graphs name, and notes about formats stored wider than in the file."""
    from dflashc.compiler.models.graph import frequencies_name

    frequencies = {frequencies_name(r.name): np.array(r.frequencies) for r in config.ropes}
    if pair is not None:
        frequencies |= {frequencies_name(r.name): np.array(r.frequencies)
                        for r in (pair.config.rope, pair.config.context_rope)}
    sources: dict[str, WeightSource] = {}
    notes: dict[str, None] = {}
    for function in module.functions.values():
        for name in (p.name for p in function.params):
            if name in sources or (name not in tensors and name not in frequencies):
                continue
            array = frequencies.get(name)
            if array is None:
                array = _plain(name, tensors[name])
            if array is not None:
                sources[name] = WeightSource(PackedWeight(name, RAW, "", 1, array.size, array.nbytes), array=array)
                continue
            weight, note = target.describe_weight(name, tensors[name].type_name, tensors[name].shape)
            sources[name] = WeightSource(weight, tensors[name])
            if note:
                notes[note] = None
    return sources, list(notes)


def _plain(name: str, tensor: GgufTensor) -> np.ndarray | None:
    """What is used as a plain array, token ids as int32; None for matrices."""
    if name == f"{PREFIX}d2t":
        return tensor.array().astype(np.int32)
    return tensor.dequantise() if stays_plain(tensor) else None


def _ordered(sources: dict[str, WeightSource], adjacent: Sequence[Sequence[str]]) -> dict[str, WeightSource]:
    """`sources` with every run of `adjacent` names side by side."""
    first_of = {names[0]: names for names in adjacent}
    moved = {name for names in adjacent for name in names[1:]}
    order = [n for name in sources if name not in moved for n in first_of.get(name, [name])]
    return {name: sources[name] for name in order}


def _compile_and_pack(lowered: Lowered, folder: Path, placed: list[Any], progress: Progress) -> Requirements:
    """Compile kernels in worker processes and pack weights here, at the same time; what the kernels require."""
    requests = list(lowered.requests.values())
    progress.start("kernels", len(requests))
    progress.start("weights", sum(w.bytes for w in placed))
    required: list[Requirements] = []
    failure: list[BaseException] = []

    def compile_kernels() -> None:
        try:
            required.append(lowered.target.compile(requests, folder, lambda n: progress.advance("kernels", n)))
        except BaseException as error:
            failure.append(error)

    compiler = threading.Thread(target=compile_kernels)
    compiler.start()
    try:
        write_weights(folder / WEIGHTS, lowered.sources, placed, lowered.target.pack_rows,
                      lowered.target.row_group, lambda size: progress.advance("weights", size))
    finally:
        compiler.join()
    if failure:
        raise failure[0]
    return required[0]


def _sources(files: list[GgufFile], progress: Progress) -> tuple[Source, ...]:
    progress.start("hashing", sum(len(f.paths) for f in files))
    sources = []
    for file in files:
        hashes = {}
        for path in file.paths:
            hashes[path.name] = sha256_file(path)
            progress.advance("hashing", 1)
        file.check_unchanged()
        sources.append(Source(file.get_str("general.name", default=file.paths[0].stem),
                              file.get_str("general.architecture"), hashes, file.size))
    return tuple(sources)
