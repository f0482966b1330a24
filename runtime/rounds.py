"""Which programs make a round, in which order. Knows their names, and nothing of what they do."""

from __future__ import annotations

HEADS = {"ids": ("ids",), "logits": ("logits",), "draw": ("logits", "draw")}
"""Programs that turn rows of the residual stream into the likeliest tokens, logits, or tokens that are drawn."""


def round_programs(width: int, block_rows: int, *roles: str) -> list[str]:
    """The programs of a round: draft `width` proposals, run the target over them and the anchor, then `roles`.

    Parameters
    ----------
    block_rows : int
        Rows of every draft, where it always runs the whole block; 0 where it runs as many as are wanted.
    """
    rows = width + 1
    block = block_rows or rows
    draft = [f"positions.{block}", f"draft.{block}", f"propose.{width}"] if width else []
    positions = [] if width and block == rows else [f"positions.{rows}"]
    return [*draft, *positions, f"decode.{rows}", *(f"{role}.{rows}" for role in roles)]


def all_round_programs(width: int, block_rows: int) -> set[str]:
    """The programs of all rounds up to `width`, which a session may ask for."""
    inject = ("inject",) if width else ()
    return {program for narrower in range(width + 1) for head in HEADS.values()
            for program in round_programs(narrower, block_rows, *head, *inject, "accept")}
