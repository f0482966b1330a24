"""`dflashc build`: what is going to be built, how far it is, and what came out. The build itself is in `build`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rich.console import Console

from dflashc.compiler.build import BuildOptions, lower
from dflashc.compiler.build import build as build_artefact
from dflashc.compiler.cli_inspect import kv_types_line, memory_table, types_table
from dflashc.compiler.drafter import normalise
from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.inspect import describe_artefact, describe_lowered
from dflashc.compiler.models import read_model_config
from dflashc.compiler.pair import check_pair
from dflashc.compiler.plan_tables import program_table
from dflashc.compiler.progress import BuildProgress
from dflashc.compiler.tables import Table, pairs, show, size
from dflashc.targets.registry import find_target


def build(options: BuildOptions, as_json: bool, verbose: bool) -> None:
    """Build an artefact with progress bars on standard error; raises what `build.build` raises."""
    started = time.perf_counter()
    if not as_json:
        show(_settings(options))
    with BuildProgress(Console(stderr=True)) as progress:
        build_artefact(options, progress)
    seconds = time.perf_counter() - started
    described = describe_artefact(options.output)
    if as_json:
        print(json.dumps({**described, "seconds": seconds}, indent=1))
        return
    if verbose:
        show([types_table("Weights by format", described["types"]), program_table(described["programs"])])
    show([memory_table(described["memory"], described["context"])])
    _print_notes(described["notes"])
    parts: Counter[str] = Counter()
    for name, nbytes in described["files"].items():
        if "/" not in name:
            parts[Path(name).stem] += nbytes  # a GPU's kernels are code and a list
    listed = ", ".join(f"{part} {size(nbytes)}" for part, nbytes in parts.items())
    print(f"{options.output}: {size(described['bytes'])} ({listed}) in {seconds:.1f} s")


def dry_run(options: BuildOptions, as_json: bool, verbose: bool) -> None:
    """Lower the model and print the plan; nothing is compiled or written."""
    if not as_json:
        show(_settings(options))
    with closing(lower(options)) as lowered:
        described = describe_lowered(lowered)
    if as_json:
        print(json.dumps(described, indent=1))
        return
    programs = described["programs"]
    show([types_table("Weights by format", described["types"]), memory_table(described["memory"], described["context"]),
          program_table(programs)])
    _print_notes(described["notes"])
    print(f"{len(programs)} programs with {described['kernels']} kernels would be compiled, and nothing was written")


def _settings(options: BuildOptions) -> Iterator[Table]:
    """What was asked for, resolved; refuses what can be refused by the file's header and the target's name."""
    with open_gguf(options.model) as gguf:
        config = read_model_config(gguf)
        name = gguf.get_str("general.name", default=gguf.paths[0].stem)
        model_size = gguf.size
        if options.drafter is not None:
            with open_gguf(options.drafter) as drafter:
                report = check_pair(gguf, config, drafter, normalise(drafter), options.overrides)
            yield pairs("Pair", report.describe())
    need = find_target(options.target).requirements()
    context = str(options.context) if options.context else f"{config.context_length} (the model's)"
    yield pairs("Build", [
        ("model", f"{name} ({config.architecture}), {config.layers} layers, {size(model_size)}"),
        ("target", f"{options.target}: {need.machine}, {need.level}"), ("uses", " ".join(need.features) or "baseline"),
        ("context", f"{context} tokens"), ("K and V", kv_types_line(options.kv_types)), ("output", options.output)])


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}")
