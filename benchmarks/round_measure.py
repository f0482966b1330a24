"""What is measured of a pair: rounds of every width, ours and llama.cpp's, the tokens they yield, and their kernels.

Owns the cases and their order. Knows nothing of tables and bars.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.contest import Case, Contestant, Results, Series, contest
from benchmarks.engines import Engine
from benchmarks.kernels import KernelTime, bytes_of_round, profile_round
from benchmarks.llama_server import ByWidth, LlamaServer, ServerOptions
from benchmarks.machine import read_bandwidth
from benchmarks.measure import OURS, PEER
from dflashc.runtime.artefact import load_artefact

Heard = Callable[[str], None]


@dataclass
class RoundMeasurement:
    """All figures of a pair. Times in seconds, sizes in bytes.

    Attributes
    ----------
    shared : Results
        Seconds per round of the widths that both engines ran, in turns; empty without llama.cpp.
    alone : dict of Series
        Seconds per round of ours by width. Width 0 is plain decoding: the target built without the drafter.
    kept : dict
        Tokens per round by contestant, then by width.
    bandwidth : float
        Bytes per second that the machine reads from memory, the better of before and after.
    needed : dict
        Bytes that our round reads at least, by width.
    kernels : dict
        Kernels of our round, by width.
    """

    shared: Results
    alone: dict[int, Series]
    kept: dict[str, dict[int, float]]
    bandwidth: float
    needed: dict[int, int] = field(default_factory=dict)
    kernels: dict[int, list[KernelTime]] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """How a pair is measured.

    Attributes
    ----------
    artefact, plain : Path
        Of the pair, and of its target alone.
    server : ServerOptions, optional
        llama.cpp with the same files.
    widths, compared : sequence of int
        Drafted tokens: that our rounds are measured for, and those of them that are compared with llama.cpp.
    prompts : Path
        Token ids of all prompts, JSON.
    tokens : int
        To generate after each of them.
    depth : int
        Tokens in the context for kernels and bytes.
    """

    artefact: Path
    plain: Path
    prompts: Path
    server: ServerOptions | None
    widths: Sequence[int]
    compared: Sequence[int]
    tokens: int
    threads: int
    context: int
    depth: int
    rounds: int

    def engine(self, artefact: Path) -> Engine:
        """Start ours with an artefact."""
        return Engine([sys.executable, "-m", "benchmarks.round_worker", str(artefact.resolve()), str(self.threads),
                       str(self.context), str(self.prompts.resolve())])


def case(width: int) -> str:
    return f"width {width}" if width else "plain"


def measure(setup: Setup, heard: Heard = lambda stage: None) -> RoundMeasurement:
    """Run all measurements; `heard` is told what comes next."""
    before = read_bandwidth(setup.threads)
    with ExitStack() as stack:
        heard("starting")
        pair = stack.enter_context(setup.engine(setup.artefact))
        plain = stack.enter_context(setup.engine(setup.plain))
        ours = ByWidth({0: plain} | dict.fromkeys(setup.widths, pair))
        contestants = [Contestant(OURS, ours, "")]
        if setup.server:
            servers = {w: stack.enter_context(LlamaServer(setup.server, w)) for w in (0, *setup.compared)}
            contestants.append(Contestant(PEER, ByWidth(servers), ""))
        kept = _kept(setup, contestants)
        rounds = partial(contest, rounds=setup.rounds)
        shared = {}
        if setup.server:
            shared = rounds(_cases(setup, (0, *setup.compared)), contestants,
                            heard=lambda done: heard(f"both, round {done} of {setup.rounds + 1}"))
        found = rounds(_cases(setup, (0, *setup.widths)), contestants[:1],
                       heard=lambda done: heard(f"ours, round {done} of {setup.rounds + 1}"))
    heard("kernels")
    artefacts = {w: load_artefact(setup.artefact if w else setup.plain) for w in (0, *setup.widths)}
    return RoundMeasurement(
        shared, {w: found[case(w)][OURS] for w in (0, *setup.widths)}, kept,
        max(before, read_bandwidth(setup.threads)),
        {w: bytes_of_round(artefact, setup.depth, w) for w, artefact in artefacts.items()},
        {w: profile_round(setup.artefact if w else setup.plain, setup.threads, setup.depth, w)
         for w in (0, *setup.compared)})


def _cases(setup: Setup, widths: Sequence[int]) -> list[Case]:
    return [Case(case(w), f"rounds {w} {setup.tokens}") for w in widths]


def _kept(setup: Setup, contestants: Sequence[Contestant]) -> dict[str, dict[int, float]]:
    """Greedy decoding yields the same tokens every time, so once is enough."""
    widths = {OURS: setup.widths, PEER: setup.compared}
    return {c.name: {0: 1.0} | {w: c.engine.ask(f"kept {w} {setup.tokens}") for w in widths[c.name]}
            for c in contestants}
