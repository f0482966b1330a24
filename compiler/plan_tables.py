"""Programs, launches and rounds of a plan as tables. Knows nothing of where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from dflashc.compiler.tables import Table, pairs, size

Description = Mapping[str, Any]


def overview_tables(programs: Sequence[Description], rounds: Sequence[Description]) -> list[Table]:
    """All programs of a plan, and all rounds."""
    columns = (">width", ">launches", ">barriers", ">weights read", ">least", ">ratio", ">Mflop")
    return [program_table(programs), Table("Rounds", columns, [
        (str(r["width"]), str(r["launches"]), str(r["barriers"]), size(r["bytes_read"]), size(r["least"]),
         _ratio(r["bytes_read"], r["least"]), _millions(r["flops"])) for r in rounds])]


def program_table(programs: Sequence[Description]) -> Table:
    """One line for all programs of a role that differ in rows and arithmetic alone."""
    columns = ("program", "rows", ">launches", ">barriers", ">launches/layer", ">barriers/layer", ">weights read",
               ">Mflop")
    lines: dict[tuple[str, ...], list[Description]] = {}
    for p in programs:
        key = (p["role"], str(p["launches"]), str(p["barriers"]), _span(p["launches_per_layer"]),
               _span(p["barriers_per_layer"]), size(p["bytes_read"]))
        lines.setdefault(key, []).append(p)
    return Table("Programs", columns, [
        (role, _ranges([p["rows"] for p in alike]), *counts,
         " - ".join(dict.fromkeys(_millions(p["flops"]) for p in (alike[0], alike[-1]))))
        for (role, *counts), alike in lines.items()])


def launch_table(name: str, launches: Sequence[Description]) -> Table:
    """One line per launch of a program; n is the number of tokens in the caches."""
    columns = (">", "operation", "kernel", "units", "waits", ">weights read", ">Mflop", "operands")
    return Table(f"Launches of {name}", columns, [
        (str(i), x["operation"], x["kernel"], x["units"], "yes" if x["barrier"] else "", size(x["bytes_read"]),
         _millions(x["flops"]), ", ".join(x["operands"])) for i, x in enumerate(launches)])


def round_tables(d: Description) -> Iterator[Table]:
    """A round: every launch, totals by phase, and the bytes beside the least."""
    columns = (">", "program", "operation", "kernel", "units", "waits", ">weights read", ">K/V read", ">Mflop")
    yield Table(f"Launches of {d['name']}, n = {d['depth']} tokens in the caches", columns, [
        (str(i), x["program"], x["operation"], x["kernel"], x["units"], "yes" if x["barrier"] else "",
         size(x["bytes_read"]), size(x["cache_bytes"]), _millions(x["flops"])) for i, x in enumerate(d["launches"])])
    phase_columns = ("phase", ">launches", ">barriers", ">weights read", ">K/V read", ">Mflop")
    total = {key: sum(p[key] for p in d["phases"])
             for key in ("launches", "barriers", "bytes_read", "cache_bytes", "flops")}
    yield Table("Phases", phase_columns, [
        (p["phase"], str(p["launches"]), str(p["barriers"]), size(p["bytes_read"]), size(p["cache_bytes"]),
         _millions(p["flops"])) for p in [*d["phases"], {"phase": "total", **total}]])
    layers = ((f"launches per {model} layer", f"{_span(counts['launches_per_layer'])}, with "
               f"{_span(counts['barriers_per_layer'])} barriers")
              for model, counts in d["layers"].items() if counts["launches_per_layer"])
    yield pairs("Summary (at least, each model's matrices and K/V are read once)", [
        *layers, ("weights read", _beside(d["bytes_read"], d["least"])),
        (f"with K/V of {d['depth']} tokens",
         _beside(d["bytes_read"] + d["cache_bytes"], d["least"] + d["least_cache"]))])


def _beside(actual: int, least: int) -> str:
    return f"{size(actual)}, at least {size(least)}, ratio {_ratio(actual, least)}"


def _span(fewest_and_most: Sequence[int]) -> str:
    return "-".join(map(str, dict.fromkeys(fewest_and_most)))


def _ratio(actual: int, least: int) -> str:
    return f"{actual / least:.3f}" if least else "-"


def _millions(flops: int) -> str:
    return f"{flops / 1e6:,.2f}"


def _ranges(rows: Sequence[int]) -> str:
    """Numbers in ascending order, runs of neighbours by their ends."""
    runs = [[row for _, row in run] for _, run in groupby(enumerate(rows), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
