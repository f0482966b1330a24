"""Rejection sampling of drafted tokens, written from the papers.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (2023), algorithm 1. Knows nothing
of models or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Numbers:
    """Random numbers in [0, 1) for n independent rounds, by what they decide, each (n,)."""

    draft: np.ndarray
    accept: np.ndarray
    resample: np.ndarray
    sample: np.ndarray

    @classmethod
    def independent(cls, count: int, seed: int) -> Numbers:
        return cls(*np.random.default_rng(seed).random((4, count)))


def pick(laws: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """From each law (n, V) the first token whose cumulated share is above the number; shares need not add up to 1."""
    shares = np.cumsum(laws, axis=-1)
    return (shares <= (numbers * shares[:, -1])[:, None]).sum(axis=-1)


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What p has more than q, or p where that is nothing; (n, V)."""
    rest = np.maximum(p - q, 0)
    return np.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)


def judge(p: np.ndarray, q: np.ndarray, proposals: np.ndarray, numbers: Numbers) -> np.ndarray:
    """The tokens (n,) that come of proposals (n,) drawn from q, (n, V) like p."""
    rows = np.arange(len(proposals))
    kept = numbers.accept * q[rows, proposals] < p[rows, proposals]
    return np.where(kept, proposals, pick(residual(p, q), numbers.resample))
