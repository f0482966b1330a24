"""Speculative rounds against llama.cpp's and against plain decoding: the same files, the same threads, in turns.

    python -m benchmarks.round --llama-cpp ~/llama-cpp/build --json round.json

Parses and orders the work; see README.md for what the figures mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import machine, round_pairs, round_report
from benchmarks.engines import PeerMissing
from benchmarks.llama_server import ServerOptions, find_server
from benchmarks.round_measure import Setup, measure
from benchmarks.round_pairs import CONTEXT, Pair
from dflashc.compiler.tables import pairs as named
from dflashc.compiler.tables import show
from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.processors import choose_threads

_CACHE = Path(__file__).parents[1] / "build" / "benchmarks"
_COMPARED = (3, 7, 15)


class _Widths(click.ParamType):
    """Numbers of drafted tokens, like 3,7,15."""

    name = "list"

    def convert(self, value: str, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        if not all(word.isdecimal() and int(word) for word in value.split(",")):
            self.fail(f"{value!r} is no list of widths like 3,7,15", param, context)
        return tuple(sorted({int(word) for word in value.split(",")}))


@click.command()
@click.option("--llama-cpp", "peer", type=click.Path(path_type=Path), help="Build folder of llama.cpp, see README.md.")
@click.option("--pairs", "patterns", multiple=True, help="Only pairs of this name; * stands for anything.")
@click.option("--widths", type=_Widths(), help="Drafted tokens per round [all; llama.cpp 3,7,15].")
@click.option("--threads", type=int, help="Threads of both engines [available cores].")
@click.option("--target", default="cpu", show_default=True, help="Target to build for.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Times all is measured.")
@click.option("--quick", is_flag=True, help="Two rounds, and only widths that are compared with llama.cpp.")
@click.option("--profile", "profiled", is_flag=True, help="Show the time of every kernel too.")
@click.option("--reuse", is_flag=True, help="Take artefacts of an earlier run instead of building them.")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), default=_CACHE, help="Models and artefacts.")
@click.option("--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write all values there.")
def main(peer: Path | None, patterns: Sequence[str], widths: tuple[int, ...] | None, threads: int | None, target: str,
         rounds: int, quick: bool, profiled: bool, reuse: bool, cache: Path, output: Path | None) -> None:
    """Measure speculative rounds of the shipped pairs and of synthetic ones of a middle size."""
    cache.mkdir(parents=True, exist_ok=True)
    chosen = round_pairs.choose([*round_pairs.shipped_pairs(), *round_pairs.synthetic_pairs(cache)], patterns)
    threads = choose_threads(threads)
    server = _server(peer)
    facts = machine.describe() | {"threads": threads, "llama.cpp": str(peer) if server else None}
    show([named("Machine", facts.items())])
    found = {}
    built: dict[Path, Path] = {}
    for pair in chosen:
        round_pairs.write(pair)
        if pair.target not in built:
            built[pair.target] = round_pairs.build_artefact(pair.target, None, target, cache, reuse)
        artefact = round_pairs.build_artefact(pair.target, pair.drafter, target, cache, reuse)
        setup = _setup(pair, artefact, built[pair.target], server, widths, threads, rounds, quick)
        click.echo(pair.name, err=True)
        measured = measure(setup, lambda stage: click.echo(stage, err=True))
        show(round_report.tables(pair.name, pair.kind, measured))
        if profiled:
            show(round_report.kernel_tables(pair.name, measured))
        found[pair.name] = round_report.document(pair.kind, measured)
    if output:
        output.write_text(json.dumps({"machine": facts, "pairs": found}, indent=1) + "\n")


def _setup(pair: Pair, artefact: Path, plain: Path, server: Path | None, widths: tuple[int, ...] | None, threads: int,
           rounds: int, quick: bool) -> Setup:
    most: int = load_artefact(artefact).manifest.drafter["width"]
    asked = widths or (_COMPARED if quick else tuple(range(1, most + 1)))
    widths = tuple(w for w in asked if w <= most)
    prompts = round_pairs.prompts(pair, artefact)
    file = artefact.with_suffix(".prompts.json")
    file.write_text(json.dumps(prompts))
    options = ServerOptions(server, pair.target, pair.drafter, threads, CONTEXT, prompts,
                            streamed=pair.kind != "code") if server else None
    return Setup(artefact, plain, file, options, widths, tuple(w for w in widths if w in _COMPARED), pair.tokens,
                 threads, CONTEXT, max(map(len, prompts)), min(rounds, 2) if quick else rounds)


def _server(peer: Path | None) -> Path | None:
    try:
        return find_server(peer)
    except PeerMissing as error:
        click.echo(f"no comparison with llama.cpp: {error}", err=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
