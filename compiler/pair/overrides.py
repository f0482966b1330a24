"""What a user may state about a pair where files are silent or wrong. Knows nothing of files."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from dflashc.runtime.errors import RequestError

DRAFT_CAUSAL = ("auto", "none", "swa", "all")
DRAFT_ROWS = ("short", "full")
_MAX_OFFSET = 8


@dataclass(frozen=True)
class Overrides:
    """Statements of the user; an artefact's manifest records them.

    Attributes
    ----------
    taps_offset
        Added to the target layers in the file to count them from 0: 0 or -1. None: by the file's dialect.
    draft_causal
        Layers in which rows of a block see only rows before them: "none", those with a window ("swa"), "all"; "auto":
        by the file.
    draft_rows
        "short" feeds as many mask rows as proposals are wanted, as llama.cpp does; "full" the whole trained block.
    embedding_scale
        Factor of the drafter's input embeddings. None: by the file and the target.
    """

    taps_offset: int | None = None
    draft_causal: str = "auto"
    draft_rows: str = "short"
    embedding_scale: float | None = None

    def __post_init__(self) -> None:
        if self.taps_offset is not None and abs(self.taps_offset) > _MAX_OFFSET:
            raise RequestError(f"--taps-offset is {self.taps_offset}; expected 0 or -1")
        if self.draft_causal not in DRAFT_CAUSAL:
            raise RequestError(f"--draft-causal is {self.draft_causal!r}; expected {', '.join(DRAFT_CAUSAL)}")
        if self.draft_rows not in DRAFT_ROWS:
            raise RequestError(f"--draft-rows is {self.draft_rows!r}; expected {', '.join(DRAFT_ROWS)}")
        if self.embedding_scale is not None and not 0 < self.embedding_scale < math.inf:
            raise RequestError(f"--embedding-scale is {self.embedding_scale}; expected a positive number")

    def given(self) -> dict[str, Any]:
        """What is stated, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
