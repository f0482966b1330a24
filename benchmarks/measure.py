"""What is measured of a model: decoding, verifying, prefill, start, memory, and decoding beside other work.

Owns the list of cases and their order. Knows nothing of tables and bars.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contest import Case, Contestant, Results, Series, contest
from benchmarks.engines import Engine
from benchmarks.kernels import bytes_of_run
from benchmarks.machine import busy_processes, read_bandwidth
from dflashc.runtime.artefact import load_artefact

OURS, IDS, PEER = "dflashc", "dflashc, ids", "llama.cpp"
"""Contestants. Only the first and the last compute the same: logits of every row in host memory."""

ROOM = 512
"""Tokens a context has beyond the depth at which it is measured."""

PREFILL = 512
VERIFY_ROWS = range(1, 17)
_VERIFY_ROWS_DEEP = (8, 16)
_DECODE_CALLS, _VERIFY_CALLS = 16, 4
_START_CONTEXT = 4096
_BUSY_PROCESSES = 2


@dataclass
class Measurement:
    """All figures of a model. Times in seconds, sizes in bytes.

    Attributes
    ----------
    results : Results
        Seconds per decoded batch.
    bandwidth : float
        Bytes per second that the machine reads from memory, the better of before and after.
    needed : dict
        Bytes that our program reads at least, by case and contestant.
    fill : dict
        Seconds to fill a context, by contestant, then by depth.
    start : dict
        Seconds from the start of the process to the first token, by contestant.
    memory : dict
        See `Engine.memory`, after a prefill and some decoding, by contestant.
    busy : Results
        The same as `results`, beside other busy processes.
    """

    results: Results
    bandwidth: float
    needed: dict[str, dict[str, int]] = field(default_factory=dict)
    fill: dict[str, dict[int, float]] = field(default_factory=dict)
    start: dict[str, Series] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    busy: Results = field(default_factory=dict)


def decode_case(depth: int) -> str:
    return f"decode at {depth}"


def verify_case(rows: int, depth: int = 0) -> str:
    return f"verify[{rows}]" + (f" at {depth}" if depth else "")


def prefill_case() -> str:
    return f"prefill {PREFILL}"


def cases(depths: Sequence[int]) -> list[Case]:
    """Everything that a contest measures; `depths` begin with 0."""
    deepest = [(rows, depths[-1]) for rows in _VERIFY_ROWS_DEEP if depths[-1]]
    return [*(Case(decode_case(d), f"run {d} 1 {_DECODE_CALLS} {{head}}") for d in depths),
            *(Case(verify_case(rows, d), f"run {d} {rows} {_VERIFY_CALLS} {{head}}")
              for rows, d in [*((rows, 0) for rows in VERIFY_ROWS), *deepest]),
            Case(prefill_case(), f"prefill {PREFILL} {{head}}")]


def measure(commands: Mapping[str, list[str]], artefact: Path, depths: Sequence[int], threads: int, rounds: int,
            heard: Callable[[str], None] = lambda stage: None) -> Measurement:
    """Run all measurements.

    Parameters
    ----------
    commands : mapping
        How to start the engines, by contestant: `OURS` and, where it is there, `PEER`.
    depths : sequence of int
        Tokens already in the context; the first is 0.
    threads : int
        Those of the engines, here for the read bandwidth.
    heard : callable
        Is told what comes next.
    """
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(command)) for name, command in commands.items()}
        fill: dict[str, dict[int, float]] = {name: {} for name in engines}
        for name, engine in engines.items():
            heard(f"filling the contexts of {name}")
            for depth in depths:
                fill[name][depth] = engine.ask(f"open {depth} {depth + ROOM}")
        before = read_bandwidth(threads)
        contestants = [Contestant(OURS, engines[OURS], "logits"), Contestant(IDS, engines[OURS], "ids"),
                       *(Contestant(n, e, "logits") for n, e in engines.items() if n != OURS)]
        results = contest(cases(depths), contestants, rounds,
                          heard=lambda done: heard(f"round {done} of {rounds + 1}"))
        bandwidth = max(before, read_bandwidth(threads))
        heard("beside busy processes")
        with busy_processes(_BUSY_PROCESSES):
            busy = contest(cases(depths)[:1], contestants, rounds, attempts=1)
    start, memory = {}, {}
    heard("starts")
    begun = [{n: _start(c) for n, c in commands.items()} for _ in range(rounds + 1)][1:]
    for name in commands:
        start[name] = Series(tuple(b[name][0] for b in begun))
        memory[name] = begun[-1][name][1]
    return Measurement(results, bandwidth, _needed(artefact, depths), fill, start, memory, busy)


def _start(command: list[str]) -> tuple[float, dict[str, int]]:
    """Seconds until a fresh process has computed a token, and its memory when it has done some more."""
    started = time.perf_counter()
    with Engine(command) as engine:
        engine.ask(f"open 0 {_START_CONTEXT}")
        engine.ask("run 0 1 1 logits")
        seconds = time.perf_counter() - started
        engine.ask(f"prefill {PREFILL} logits")
        engine.ask(f"run 0 1 {_DECODE_CALLS} logits")
        return seconds, engine.memory()


def _needed(directory: Path, depths: Sequence[int]) -> dict[str, dict[str, int]]:
    artefact = load_artefact(directory)
    runs = {decode_case(d): (d, 1) for d in depths} | {verify_case(rows): (0, rows) for rows in VERIFY_ROWS}
    runs |= {verify_case(rows, depths[-1]): (depths[-1], rows) for rows in _VERIFY_ROWS_DEEP}
    heads = {OURS: "logits", IDS: "ids"}
    return {case: {name: bytes_of_run(artefact, depth, rows, head) for name, head in heads.items()}
            for case, (depth, rows) in runs.items()}
