"""Plain decoding against llama.cpp: the same file, the same threads, in turns.

    python -m benchmarks.plain --llama-cpp ~/llama.cpp/build --json plain.json

Parses and orders the work; see README.md for what the figures mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import machine, report
from benchmarks.engines import PeerMissing, compile_llama_cpp, dflashc_command, llama_cpp_command
from benchmarks.kernels import profile
from benchmarks.measure import OURS, PEER, ROOM, measure
from benchmarks.models import build_artefact, context_length, default_models
from dflashc.compiler.tables import Table, pairs, show
from dflashc.runtime.processors import choose_threads

_DEPTHS = (0, 2048, 8192)
_CONTEXT = 4096
_CACHE = Path(__file__).parents[1] / "build" / "benchmarks"
_PROFILED = ((1, "logits"), (8, "logits"), (16, "logits"), (256, "logits"))


@click.command()
@click.argument("models", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--llama-cpp", "peer", type=click.Path(path_type=Path), help="Build folder of llama.cpp, see README.md.")
@click.option("--threads", type=int, help="Threads of both engines [available cores].")
@click.option("--target", default="cpu", show_default=True, help="Target to build for.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Times all is measured.")
@click.option("--quick", is_flag=True, help="Two rounds, and no depth beyond 2048.")
@click.option("--profile", "profiled", is_flag=True, help="Show the time of every kernel too.")
@click.option("--reuse", is_flag=True, help="Take artefacts of an earlier run instead of building them.")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), default=_CACHE, help="Models and artefacts.")
@click.option("--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write all values there.")
def main(models: Sequence[Path], peer: Path | None, threads: int | None, target: str, rounds: int, quick: bool,
         profiled: bool, reuse: bool, cache: Path, output: Path | None) -> None:
    """Measure MODELS (GGUF files) with dflashc and llama.cpp; without any, three default models."""
    cache.mkdir(parents=True, exist_ok=True)
    threads = choose_threads(threads)
    helper = _helper(peer, cache)
    facts = machine.describe() | {"threads": threads, "llama.cpp": str(peer) if helper else None}
    show([pairs("Machine", facts.items())])
    found = {}
    for model in models or default_models(cache):
        depths = _depths(model, quick)
        artefact = build_artefact(model, target, max(_CONTEXT, depths[-1] + ROOM), cache, reuse)
        commands = {OURS: dflashc_command(artefact, threads)}
        if helper:
            commands[PEER] = llama_cpp_command(helper, model, threads)
        measured = measure(commands, artefact, depths, threads, 2 if quick else rounds,
                           lambda stage: click.echo(stage, err=True))
        show(report.tables(model.name, measured, depths))
        if profiled:
            show(_profiles(artefact, threads, depths))
        found[model.name] = report.document(measured, depths)
    if output:
        output.write_text(json.dumps({"machine": facts, "models": found}, indent=1) + "\n")


def _helper(peer: Path | None, cache: Path) -> Path | None:
    try:
        return compile_llama_cpp(peer, cache)
    except PeerMissing as error:
        click.echo(f"no comparison with llama.cpp: {error}", err=True)
        return None


def _depths(model: Path, quick: bool) -> list[int]:
    """Depths that the model's context has room for."""
    most = context_length(model) - ROOM
    return [d for d in _DEPTHS[: 2 if quick else None] if d <= most]


def _profiles(artefact: Path, threads: int, depths: Sequence[int]) -> list[Table]:
    runs = [*((0, rows, head) for rows, head in _PROFILED), (depths[-1], 1, "logits")]
    return [report.profile_table(f"{artefact.stem}: {rows} rows at {depth}, {head}",
                                 profile(artefact, threads, depth, rows, head)) for depth, rows, head in runs]


if __name__ == "__main__":
    main()
