"""Tables, bars and JSON of measured rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.contest import Series
from benchmarks.kernels import KernelTime
from benchmarks.measure import OURS, PEER
from benchmarks.report import Bar, bar_documents, bar_table, profile_table
from benchmarks.round_measure import RoundMeasurement, case
from dflashc.compiler.tables import Table

PHASES = ("positions", "draft", "propose", "decode", "ids", "inject", "accept")

_COMPARED = (7, 15)


def bars(measured: RoundMeasurement, kind: str) -> Iterator[Bar]:
    """The bars that can be told from the measurement of a pair of this kind."""
    for width in _COMPARED:
        row = measured.shared.get(case(width), {})
        if PEER in row:
            yield Bar(f"round of {width} ÷ llama.cpp's", 0.45, row[OURS].ratio(row[PEER]).median, cost=True)
    if kind != "code" and 7 in measured.alone:
        yield Bar("round of 7 ÷ plain step", 3.5, _steps(measured, 7).median, cost=True)
    widths = [w for w in measured.alone if w]
    if kind == "code" and widths:
        yield Bar("speculative ÷ plain speed", 1.5, max(_speed_up(measured, w) for w in widths))
    if kind != "random" and measured.shared:
        ours, peer = (max(_speeds(measured, name).values()) for name in (OURS, PEER))
        yield Bar("speculative speed ÷ llama.cpp's", 2.0, ours / peer)


def tables(name: str, kind: str, measured: RoundMeasurement) -> list[Table]:
    """Everything for people, but for single kernels."""
    return [_comparison(name, measured), _widths(name, measured), _phases(name, measured),
            bar_table(name, list(bars(measured, kind)))]


def kernel_tables(name: str, measured: RoundMeasurement) -> list[Table]:
    """The kernels of a round, by width."""
    return [profile_table(f"{name}, {case(width)}", times) for width, times in measured.kernels.items()]


def document(kind: str, measured: RoundMeasurement) -> dict[str, Any]:
    """Everything for programs; see `RoundMeasurement` for units."""
    return dataclasses.asdict(measured) | {"bars": bar_documents(list(bars(measured, kind)))}


def _steps(measured: RoundMeasurement, width: int) -> Series:
    """Cost of our round in our own plain steps."""
    return measured.alone[width].ratio(measured.alone[0])


def _speed_up(measured: RoundMeasurement, width: int) -> float:
    """How many times as fast as plain decoding our rounds are."""
    return measured.kept[OURS][width] / _steps(measured, width).median


def _speeds(measured: RoundMeasurement, contestant: str) -> dict[int, float]:
    """Tokens per second by width, of the widths that both engines ran with drafts."""
    return {w: kept / measured.shared[case(w)][contestant].median
            for w, kept in measured.kept[contestant].items() if w and case(w) in measured.shared}


def _comparison(name: str, measured: RoundMeasurement) -> Table:
    rows = []
    shared, kept = measured.shared, measured.kept
    for width in (w for w in measured.alone if case(w) in shared):
        row = shared[case(width)]
        ours, peer = row[OURS], row[PEER]
        rows.append((case(width), peer.text(1e3), ours.text(1e3), ours.ratio(peer).text(),
                     *(f"{row[c].ratio(shared[case(0)][c]).median:.2f}" for c in (PEER, OURS)),
                     *(f"{kept[c][width]:.2f}" for c in (PEER, OURS)),
                     *(f"{kept[c][width] / row[c].median:.1f}" for c in (PEER, OURS))))
    both = [f">{figure}, {c}" for figure in ("÷ plain", "tokens/round", "tokens/s") for c in (PEER, OURS)]
    return Table(f"{name}: milliseconds per round; {_disturbed(s for row in shared.values() for s in row.values())}",
                 ("round", f">{PEER}", f">{OURS}", ">ours ÷ theirs", *both), rows)


def _widths(name: str, measured: RoundMeasurement) -> Table:
    rows = []
    for width, series in measured.alone.items():
        limit, steps = measured.needed[width] / measured.bandwidth, _steps(measured, width)
        kept = measured.kept[OURS][width]
        rows.append((case(width), series.text(1e3), steps.text(), f"{kept:.2f}", f"{kept / series.median:.1f}",
                     f"{_speed_up(measured, width):.2f}", f"{1e3 * limit:.2f}", f"{limit / series.median:.0%}"))
    return Table(f"{name}: our rounds, milliseconds; {measured.bandwidth / 1e9:.1f} GB/s read from memory; "
                 f"{_disturbed(measured.alone.values())}",
                 ("round", ">time", ">÷ plain", ">tokens/round", ">tokens/s", ">speed-up", ">memory limit",
                  ">share"), rows)


def _phases(name: str, measured: RoundMeasurement) -> Table:
    rows = []
    for width, times in measured.kernels.items():
        total = sum(t.seconds for t in times)
        rows.append((case(width), f"{1e3 * total:.2f}", *(_share(times, phase, total) for phase in PHASES)))
    return Table(f"{name}: phases of our rounds", ("round", ">ms", *(f">{phase}" for phase in PHASES)), rows)


def _share(times: list[KernelTime], phase: str, total: float) -> str:
    seconds = sum(t.seconds for t in times if t.part == phase)
    return f"{seconds / total:.1%}" if seconds else ""


def _disturbed(series: Iterable[Series]) -> str:
    counts = [(s.disturbed, len(s.values)) for s in series]
    return f"{sum(d for d, _ in counts)} of {sum(n for _, n in counts)} samples disturbed by other work"
