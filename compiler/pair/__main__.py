"""Prints the tables of drafter dialects and aliases for the README: python -m dflashc.compiler.pair"""

from __future__ import annotations

from dflashc.compiler.drafter import alias_table, dialect_table, markdown

if __name__ == "__main__":
    print(markdown(dialect_table()), markdown(alias_table()), sep="\n\n")
