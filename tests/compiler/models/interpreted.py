"""A model's Relax module run by the NumPy interpreter, with its caches; the counterpart of `ReferenceModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from dflashc.compiler.models.config import ModelConfig
from tests.reference.config import Weights
from tests.reference.relax_numpy import evaluate


@dataclass(frozen=True)
class Result:
    """Of rows of tokens: taps (rows, hidden), logits (rows, vocabulary) and the best ids (rows,)."""

    taps: list[np.ndarray]
    logits: np.ndarray
    ids: np.ndarray


class InterpretedModel:
    """The module's three functions chained.

    Parameters
    ----------
    forms
        The activation form of each weight, see `evaluate`.
    kv_dtype
        Type of the caches.
    """

    def __init__(
        self,
        module: tvm.IRModule,
        config: ModelConfig,
        weights: Weights,
        forms: Mapping[str, str] | None = None,
        dtype: type[np.floating] = np.float64,
        kv_dtype: type[np.floating] = np.float64,
    ) -> None:
        self._module, self._forms, self._dtype = module, forms, dtype
        shape = (config.kv_heads, config.context_length, config.head_size)
        self._inputs: dict[str, np.ndarray] = {
            **{name: weight.values for name, weight in weights.items()},
            **{f"rope.{rope.name}.frequencies": np.array(rope.frequencies) for rope in config.ropes},
            **{f"cache.{layer}.{which}": np.zeros(shape, kv_dtype) for layer in range(config.layers) for which in "kv"},
        }

    def forward(self, tokens: Sequence[int], start_position: int) -> Result:
        """Run tokens at positions start_position..."""
        state = np.zeros(8, np.int64)
        state[0] = start_position
        residual, *taps = self._run("decode", tokens=np.array(tokens, np.int32), state=state)
        return Result(taps, self._run("logits", hidden=residual), self._run("ids", hidden=residual))

    def _run(self, function: str, **inputs: np.ndarray) -> Any:
        return evaluate(self._module[function], {**self._inputs, **inputs}, self._forms, self._dtype)
