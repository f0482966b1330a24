"""Tables for people: with rules and colours on a terminal, aligned text elsewhere.

Knows nothing of what is in them; cells may hold text from strangers' files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Columns whose name starts with ">" are aligned to the right; without names, the table has no head."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def pairs(title: str, values: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values."""
    return Table(title, (), [(name, str(value)) for name, value in values])


def show(tables: Iterable[Table]) -> None:
    """Print tables to standard output; those without rows are left out."""
    for table in tables:
        if table.rows:
            (_show_rich if sys.stdout.isatty() else _show_plain)(table)


def visible(text: str) -> str:
    """`text` with everything that a terminal would obey instead of show written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _show_plain(table: Table) -> None:
    lines = [[name.removeprefix(">") for name in table.columns]] if table.columns else []
    lines += [[visible(cell) for cell in row] for row in table.rows]
    right = [name.startswith(">") for name in table.columns] or [False] * len(lines[0])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(table.title)
    for line in lines:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        print("  " + "  ".join(cells).rstrip())
    print()


def _show_rich(table: Table) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE, show_header=bool(table.columns))
    for name in table.columns or [""] * len(table.rows[0]):
        shown.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(visible(cell)) for cell in row))
    console = Console()
    console.print(Text(table.title, style="bold"), shown, sep="\n")
