"""A picture of a tuning record: what rounds cost by width, and what drafts yield by kind of text.

Needs matplotlib, of the extra `bench`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dflashc.runtime.acceptance import expected_tokens
from dflashc.runtime.errors import RequestError
from dflashc.runtime.tuning import Record

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise `RequestError` unless `plot` can write `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(f"{path} ends in {path.suffix!r}; a plot can be {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("a plot needs matplotlib: pip install 'dflashc[bench]'")


def plot(record: Record, path: Path) -> None:
    """Write the picture: cost relative to a plain step, tokens per round, and the speed-up at the least depth."""
    from matplotlib.figure import Figure

    widths = range(record.most_width + 1)
    figure = Figure(figsize=(12, 4), layout="constrained")
    cost, tokens, gain = figure.subplots(1, 3)
    for depth, seconds in zip(record.depths, record.rounds, strict=True):
        cost.plot(widths, [s / seconds[0] for s in seconds], marker="o", label=f"depth {depth:,}")
    plain = record.rounds[0][0]
    for kind, counts in record.acceptance.items():
        expected = expected_tokens(counts.conditional())
        tokens.plot(widths, expected, marker="o", label=kind)
        speedups = [t * plain / s for t, s in zip(expected, record.rounds[0], strict=True)]
        gain.plot(widths, speedups, marker="o", label=kind)
    gain.axhline(1, color="grey", linewidth=1)
    for axes, title in ((cost, "time of a round ÷ plain step"), (tokens, "tokens per round"),
                        (gain, f"speed-up at depth {record.depths[0]:,}")):
        axes.set_title(title)
        axes.set_xlabel("width (drafted tokens)")
        axes.set_xticks(list(widths))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(record.key.device)
    figure.savefig(path, dpi=150)
