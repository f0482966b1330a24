"""`dflashc tune`: measures an artefact on this machine, stores the record, and shows what it says.

Owns the tables. Imports nothing but the runtime.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflashc.compiler.tables import Table, show
from dflashc.runtime import tuning
from dflashc.runtime.acceptance import expected_tokens
from dflashc.runtime.errors import RequestError
from dflashc.runtime.generate import Model, load
from dflashc.runtime.kernel_choice import Trial, choices_of, time_kernels
from dflashc.runtime.measuring import depths_up_to, measure_acceptance, measure_costs
from dflashc.runtime.prompts import load_prompts

BUSY = 1.25
"""Spread of equal rounds from which on the user is told that the machine was busy."""


@dataclass(frozen=True)
class TuneOptions:
    """What the user asked for.

    Attributes
    ----------
    seconds : float
        Time for each depth, and for each kind of text.
    tokens : int
        To generate per prompt.
    plot : Path, optional
        Picture to write, in the format of its suffix.
    in_artefact : bool
        Store the record in the artefact instead of the user's cache.
    """

    artefact: Path
    threads: int | None
    gpu: str | None
    allow_ptx: bool
    context: int | None
    seconds: float
    tokens: int
    plot: Path | None
    in_artefact: bool
    as_json: bool


def tune(options: TuneOptions) -> None:
    """Measure, store and show. Raises `RequestError` for an artefact without a drafter, before anything is run."""
    if options.plot is not None:
        from dflashc.compiler.plot_tuning import check_plot

        check_plot(options.plot)
    with load(options.artefact, options.threads, options.gpu, options.allow_ptx) as model:
        if not model.artefact.manifest.drafter and not choices_of(model.artefact.plan):
            raise RequestError(f"{options.artefact} has no drafter, so there is no width to tune; build with --drafter")
        for note in model.device.notes:
            print(f"dflashc: note: {note}", file=sys.stderr)
        record, spread, trials = _measure(model, options)
        folder = tuning.artefact_folder(model.artefact) if options.in_artefact else tuning.cache_folder()
        path = tuning.save(record, folder)
    if options.plot is not None:
        from dflashc.compiler.plot_tuning import plot

        plot(record, options.plot)
    if options.as_json:
        document = {"path": str(path), "spread": spread, **record.to_json()}
        print(json.dumps(document | {"choices": [vars(c) for c in best_choices(record)]}, indent=1))
        return
    show([kernel_table(trials), *cost_tables(record), acceptance_table(record), choice_table(record)])
    if spread > BUSY:
        print(f"note: times of one and the same round lie {spread:.2f} times apart (quartiles); the machine was busy, "
              "tune again when it is not")
    print(f"stored in {path}")


def _measure(model: Model, options: TuneOptions) -> tuple[tuning.Record, float, list[Trial]]:
    """Kernels first, since rounds cost what they cost with the best ones."""
    most = model.artefact.plan.max_context
    heard = _heard if sys.stderr.isatty() else lambda what, done, total: None
    trials = time_kernels(model.artefact, model.device, heard)
    kernels = {trial.choice: trial.best for trial in trials}
    model.artefact = tuning.with_kernels(model.artefact, kernels)
    session = model.generator(model.choose_context(most if options.context is None else options.context)).session
    costs = measure_costs(session, depths_up_to(session.context, session.most_width), options.seconds, heard)
    acceptance = {}
    if session.most_width:
        prompts = {kind: [_encode(model, kind, text) for text in texts] for kind, texts in load_prompts().items()}
        acceptance = measure_acceptance(session, prompts, options.tokens, options.seconds,
                                        model.tokenizer.end_of_generation_ids, heard)
    if heard is _heard:
        print("\r\033[K", end="", file=sys.stderr)
    return tuning.Record(tuning.Key.of(model.artefact, model.device), costs.depths, acceptance=acceptance,
                         kernels=kernels, **costs.parts), costs.spread, trials


def _encode(model: Model, kind: str, text: str) -> list[int]:
    chat = kind == "chat" and model.template is not None
    return model.encode([{"role": "user", "content": text}] if chat else text)


def _heard(what: str, done: int, total: int) -> None:
    print(f"\r\033[Kmeasuring {what} ({done + 1} of {total})", end="", file=sys.stderr, flush=True)


# What a record says --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The best width for a kind of text at a depth, and how many times faster than plain decoding it is."""

    kind: str
    depth: int
    width: int
    speedup: float


def best_choices(record: tuning.Record) -> Iterator[Choice]:
    """By kind and depth, from the costs and the acceptance of that kind."""
    for kind, counts in record.acceptance.items():
        tokens = expected_tokens(counts.conditional())
        for depth, seconds in zip(record.depths, record.rounds, strict=True):
            speeds = [t / s for t, s in zip(tokens, seconds, strict=True)]
            width = max(range(len(speeds)), key=speeds.__getitem__)
            yield Choice(kind, depth, width, speeds[width] / speeds[0])


def kernel_table(trials: list[Trial]) -> Table:
    """What each variant of a choice takes, and which one was taken; empty where there was nothing to choose."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.seconds))
    rows = [[t.choice, *(_milliseconds(t.seconds[n]) if math.isfinite(t.seconds.get(n, math.inf)) else "-"
                         for n in names), t.best] for t in trials]
    return Table("Kernels, one row and eight (ms)", ("matmul", *(f">{n}" for n in names), "chosen"), rows)


def cost_tables(record: tuning.Record) -> Iterator[Table]:
    """One per depth: the parts of a round in milliseconds, and the round as a multiple of a plain step."""
    for index, depth in enumerate(record.depths):
        columns = [table[index] for table in (record.draft, record.verify, record.inject, record.rounds)]
        rows = [[str(width), *(_milliseconds(column[width]) for column in columns),
                 f"{columns[-1][width] / columns[-1][0]:.2f}"] for width in range(record.most_width + 1)]
        yield Table(f"Round at depth {depth:,} (ms)",
                    (">width", ">draft", ">verify", ">inject", ">round", ">÷ plain"), rows)


def acceptance_table(record: tuning.Record) -> Table:
    """Per kind of text, the share of rounds that keep each position."""
    positions = range(record.most_width)
    rows = [[kind, str(counts.offered[0]), f"{1 + sum(shares):.2f}", *(f"{shares[p]:.2f}" for p in positions)]
            for kind, counts in record.acceptance.items() for shares in [counts.per_position()]]
    return Table(f"Accepted per position, drafts of {record.most_width}",
                 ("text", ">rounds", ">tokens/round", *(f">{p + 1}" for p in positions)), rows)


def choice_table(record: tuning.Record) -> Table:
    """The best width and what it gains, per kind of text and depth."""
    found = list(best_choices(record))
    rows = [[kind, *(f"{c.width} ({c.speedup:.2f}x)" for c in found if c.kind == kind)] for kind in record.acceptance]
    return Table("Best width and expected speed-up over plain decoding",
                 ("text", *(f">depth {depth:,}" for depth in record.depths)), rows)


def _milliseconds(seconds: float) -> str:
    """Three digits that mean something."""
    if not seconds:
        return "-"
    value = seconds * 1e3
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
