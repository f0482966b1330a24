"""Tables, bars and JSON of the measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contest import Series
from benchmarks.kernels import KernelTime
from benchmarks.measure import IDS, OURS, PEER, Measurement, decode_case, prefill_case, verify_case
from dflashc.compiler.tables import Table, size


@dataclass(frozen=True)
class Bar:
    """A figure that must be at least `required`, or at most where it is a cost."""

    name: str
    required: float
    found: float
    cost: bool = False

    @property
    def reached(self) -> bool:
        return self.found <= self.required if self.cost else self.found >= self.required


def bars(measured: Measurement, depths: Sequence[int]) -> list[Bar]:
    """The bars that can be told from a measurement: ratios to llama.cpp, above 1 where ours is better, but for one."""
    quiet, busy = (r[decode_case(0)][OURS] for r in (measured.results, measured.busy))
    kept = Bar(f"speed of {decode_case(0)} kept beside busy processes", 1 / 3, quiet.median / busy.median)
    if PEER not in measured.start:
        return [kept]

    def ratio(case: str) -> float:
        return measured.results[case][PEER].ratio(measured.results[case][OURS]).median

    found = [Bar(decode_case(d), 1.4, ratio(decode_case(d))) for d in depths]
    found += [Bar(verify_case(rows), 2.0, ratio(verify_case(rows))) for rows in (8, 16)]
    if depths[-1]:
        attention = {p: attention_seconds(measured, p, depths[-1]) for p in (OURS, PEER)}
        found.append(Bar(f"attention at {depths[-1]}", 2.0, attention[PEER] / attention[OURS]))
    memory = {name: m["peak"] for name, m in measured.memory.items()}
    return [*found, Bar(prefill_case(), 1.0, ratio(prefill_case())),
            Bar("time to the first token", 1.0, measured.start[PEER].ratio(measured.start[OURS]).median),
            Bar("peak memory", 1.0, memory[PEER] / memory[OURS]), kept]


def attention_seconds(measured: Measurement, contestant: str, depth: int) -> float:
    """What a token costs more at `depth` than at 0: attention over the cache."""
    return measured.results[decode_case(depth)][contestant].median - measured.results[decode_case(0)][contestant].median


def tables(name: str, measured: Measurement, depths: Sequence[int]) -> list[Table]:
    """Everything for people. Times are medians and ranges over the rounds, in milliseconds."""
    return [_times(name, measured), _attention(name, measured, depths), _starts(name, measured),
            _busy(name, measured),
            bar_table(name, bars(measured, depths))]


def bar_table(name: str, found: Sequence[Bar]) -> Table:
    """Bars, and which of them are missed."""
    return Table(f"{name}: bars", ("figure", ">required", ">found", ""),
                 [(b.name, f"{'<=' if b.cost else '>='} {b.required:.2f}", f"{b.found:.2f}",
                   "" if b.reached else "missed") for b in found])


def profile_table(title: str, times: Sequence[KernelTime]) -> Table:
    """Kernels by their share of a run."""
    total = sum(t.seconds for t in times)
    rows = [(t.part, t.kernel, str(t.launches), f"{1e3 * t.seconds:.3f}", f"{t.seconds / total:.1%}",
             f"{t.bytes_read / t.seconds / 1e9:.1f}" if t.bytes_read else "",
             f"{t.flops / t.seconds / 1e9:.0f}" if t.flops else "") for t in times if t.seconds]
    return Table(f"{title}: {1e3 * total:.2f} ms",
                 ("part", "kernel", ">launches", ">ms", ">share", ">GB/s", ">GFLOP/s"), rows)


def document(measured: Measurement, depths: Sequence[int]) -> dict[str, Any]:
    """Everything for programs; see `Measurement` for units."""
    return dataclasses.asdict(measured) | {"bars": bar_documents(bars(measured, depths))}


def bar_documents(found: Sequence[Bar]) -> list[dict[str, Any]]:
    """Bars for programs."""
    return [dataclasses.asdict(b) | {"reached": b.reached} for b in found]


def _times(name: str, measured: Measurement) -> Table:
    contestants = [c for c in (PEER, OURS, IDS) if c in next(iter(measured.results.values()))]
    ratios = [c for c in (OURS, IDS) if PEER in contestants]
    rows = []
    for case, row in measured.results.items():
        cells = [case, *(row[c].text(1e3) for c in contestants), *(row[PEER].ratio(row[c]).text() for c in ratios)]
        limits = {c: nbytes / measured.bandwidth for c, nbytes in measured.needed.get(case, {}).items()}
        cells.append(f"{1e3 * limits[OURS]:.2f}" if limits else "")
        cells += [f"{limits[c] / row[c].median:.0%}" if limits else "" for c in (OURS, IDS)]
        rows.append(cells)
    series = [s for row in measured.results.values() for s in row.values()]
    disturbed, samples = sum(s.disturbed for s in series), sum(len(s.values) for s in series)
    return Table(f"{name}: milliseconds; {measured.bandwidth / 1e9:.1f} GB/s read from memory; "
                 f"{disturbed} of {samples} samples disturbed by other work",
                 ("case", *(f">{c}" for c in contestants), *(f">ratio, {c}" for c in ratios),
                  ">memory limit", f">share, {OURS}", f">share, {IDS}"), rows)


def _attention(name: str, measured: Measurement, depths: Sequence[int]) -> Table:
    contestants = [c for c in (PEER, OURS) if c in next(iter(measured.results.values()))]
    rows = [(str(d), *(f"{1e3 * attention_seconds(measured, c, d):.2f}" for c in contestants)) for d in depths if d]
    return Table(f"{name}: attention over the cache, milliseconds per token",
                 ("depth", *(f">{c}" for c in contestants)), rows)


def _starts(name: str, measured: Measurement) -> Table:
    rows = [(c, start.text(), size(m["peak"]), size(m["anonymous"]), size(m["mapped"]))
            for c, start in measured.start.items() for m in [measured.memory[c]]]
    return Table(f"{name}: start and memory", ("engine", ">first token, s", ">peak", ">anonymous", ">mapped"), rows)


def _busy(name: str, measured: Measurement) -> Table:
    rows = []
    for case, row in measured.busy.items():
        for contestant, busy in row.items():
            quiet: Series = measured.results[case][contestant]
            rows.append((contestant, case, quiet.text(1e3), busy.text(1e3), f"{quiet.median / busy.median:.0%}"))
    return Table(f"{name}: beside two busy processes, milliseconds",
                 ("engine", "case", ">alone", ">beside", ">speed kept"), rows)
