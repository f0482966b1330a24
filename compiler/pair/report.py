"""What the pair check found: for the build, for the manifest, and to print. Knows nothing of how it was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflashc.compiler.drafter.config import DrafterConfig, describe
from dflashc.compiler.pair.overrides import Overrides


@dataclass(frozen=True)
class PairReport:
    """A pair that fits.

    Attributes
    ----------
    config
        The drafter's, with everything resolved that depends on the target or on `overrides`.
    vocabulary
        Tokens that both models have; logits are cut to them.
    mask_token
        Text of the mask token in the target's vocabulary; empty when it has none.
    notes, warnings
        For the user, a line each.
    """

    target_name: str
    target_architecture: str
    target_layers: int
    target_vocabulary: int
    config: DrafterConfig
    vocabulary: int
    mask_token: str
    overrides: Overrides
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes), "warnings": list(self.warnings)}

    def describe(self) -> list[tuple[str, str]]:
        """(label, value) rows to print."""
        rows = [("target", f"{self.target_name} ({self.target_architecture}, {self.target_layers} layers, "
                           f"{self.target_vocabulary} tokens)")]
        rows += [(label, f"{value} {self.mask_token!r}" if label == "mask token" and self.mask_token else value)
                 for label, value in describe(self.config)]
        rows.append(("vocabulary", f"{self.vocabulary} tokens in common"))
        rows.append(("drafted rows", self.overrides.draft_rows))
        rows += [("given", f"{key.replace('_', ' ')} {value}") for key, value in self.overrides.given().items()]
        rows += [("note", text) for text in self.notes]
        return rows + [("warning", text) for text in self.warnings]
