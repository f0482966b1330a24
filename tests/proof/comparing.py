"""How far an artefact is from what others say: llama.cpp (tests/data/golden-*.json) and the reference models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dflashc.runtime.session import Session
from tests.proof.running import logits_along
from tests.reference.functions import log_softmax
from tests.reference.transformer import ReferenceModel

DATA = Path(__file__).parents[1] / "data"


def recorded(name: str) -> Any:
    """The parsed file tests/data/`name`.json."""
    return json.loads((DATA / f"{name}.json").read_text())


@dataclass(frozen=True)
class Golden:
    """The parsed file about one model.

    "forced" holds texts with their token ids and, per position, the log-probability of the token that follows (null
    where llama.cpp did not tell) and the five best; "greedy" holds prompts with the two best at every step.
    """

    document: Any

    @classmethod
    def load(cls, name: str) -> Golden:
        return cls(recorded(f"golden-{name}"))

    @property
    def forced(self) -> list[Any]:
        return self.document["forced"]

    @property
    def greedy(self) -> list[Any]:
        return self.document["greedy"]

    @cached_property
    def following(self) -> np.ndarray:
        """Log-probability of the following token over all positions of all fixed texts, NaN where unknown."""
        return np.array([row["next"][1] for text in self.forced for row in text["rows"]], np.float64)

    @cached_property
    def best(self) -> np.ndarray:
        """The best token over all positions of all fixed texts."""
        return np.array([row["top5"][0][0] for text in self.forced for row in text["rows"]])

    @cached_property
    def five(self) -> np.ndarray:
        """Log-probabilities (positions, 5) of the five best tokens over all positions of all fixed texts."""
        return np.array([[said for _, said in row["top5"]] for text in self.forced for row in text["rows"]])


@dataclass(frozen=True)
class Found:
    """What an artefact gives over all positions of all fixed texts, in the order of `Golden`."""

    following: np.ndarray
    best: np.ndarray
    five: np.ndarray


def along_forced(session: Session, golden: Golden) -> Found:
    """What the session gives; `five` are the log-probabilities of llama.cpp's five best tokens."""
    following, best, five = [], [], []
    for text in golden.forced:
        ids = text["ids"][: len(text["rows"]) + 1]
        said = log_softmax(logits_along(session, ids)[:-1].astype(np.float64))
        following.append(said[np.arange(len(said)), ids[1:]])
        best.append(said.argmax(axis=-1))
        five.append([said[i, [token for token, _ in row["top5"]]] for i, row in enumerate(text["rows"])])
    return Found(*map(np.concatenate, (following, best, five)))


@dataclass(frozen=True)
class Step:
    """A step of a greedy continuation: the lead of llama.cpp's best token, and whether the artefact takes it too."""

    lead: float
    agrees: bool


def along_greedy(session: Session, golden: Golden) -> list[list[Step]]:
    """The steps of every continuation, each behind llama.cpp's own tokens, so that one difference leads to no other."""
    runs = []
    for run in golden.greedy:
        tokens = [best[0] for best, _ in run["steps"]]
        ids = [*run["prompt_ids"], *tokens[:-1]]
        chosen = logits_along(session, ids)[len(run["prompt_ids"]) - 1 :].argmax(axis=-1)
        runs.append([Step(best[1] - second[1], int(token) == best[0])
                     for token, (best, second) in zip(chosen, run["steps"], strict=True)])
    return runs


def error(session: Session, reference: ReferenceModel, ids: Sequence[int]) -> float:
    """The largest error of a logit along a text, relative to the largest logit; one token at a time."""
    expected = reference.forward(ids, 0).logits
    return float(np.abs(logits_along(session, ids, rows=1) - expected).max() / np.abs(expected).max())


def errors(session: Session, reference: ReferenceModel, ids: Sequence[int]) -> tuple[float, list[float]]:
    """`error` along the whole text, and along its pieces of three tokens, each on its own."""
    pieces = [ids[start : start + 3] for start in range(0, len(ids) - 2, 3)]
    return error(session, reference, ids), [error(session, reference, piece) for piece in pieces]
