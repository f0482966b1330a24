"""Which programs make a round, in which order. Knows their names, and nothing of what they do."""

from __future__ import annotations

HEADS = {"ids": ("ids",), "logits": ("logits",), "draw": ("logits", "draw")}
"""Programs that turn rows of the residual stream into the likeliest tokens, logits, or tokens that are drawn."""


def draft_programs(width: int, block_rows: int, proposer: str = "propose") -> list[str]:
    """The programs that draft `width` proposals, 1 at least.

    Parameters
    ----------
    block_rows : int
        Rows of every draft, where it always runs the whole block; 0 where it runs as many as are wanted.
    proposer : str
        Role of the last one: "propose", or "weigh".
    """
    block = block_rows or width + 1
    return [f"positions.{block}", f"draft.{block}", f"{proposer}.{width}"]


def verify_programs(width: int, *roles: str) -> list[str]:
    """The programs that run the target over the anchor and `width` proposals, then those of `roles`."""
    rows = width + 1
    return [f"positions.{rows}", f"decode.{rows}", *(f"{role}.{rows}" for role in roles)]


def round_programs(width: int, block_rows: int, *roles: str) -> list[str]:
    """The programs of a whole round: draft, verify, then `roles`; a plain step for width 0."""
    draft = draft_programs(width, block_rows) if width else []
    positions, *verify = verify_programs(width, *roles)
    return [*draft, *([] if positions in draft else [positions]), *verify]


def weighing(candidates: int) -> str:
    """Role of the program that proposes and leaves the confidence of its proposals: the selector of version 2, which
    gives `candidates` probabilities, always does; version 1 has a program for it."""
    return "propose" if candidates else "weigh"


def all_round_programs(width: int, block_rows: int, candidates: int) -> set[str]:
    """The programs of all rounds up to `width`, which a session may ask for."""
    inject = ("inject",) if width else ()
    rounds = [round_programs(narrower, block_rows, *head, *inject, "accept")
              for narrower in range(width + 1) for head in HEADS.values()]
    drafts = [draft_programs(drafted, block_rows, weighing(candidates)) for drafted in range(1, width + 1)]
    verified = [verify_programs(narrower) for narrower in range(width + 1)]
    return {program for programs in (*rounds, *drafts, *verified) for program in programs}
