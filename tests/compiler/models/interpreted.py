"""A model's Relax module run by the NumPy interpreter, with its caches; the counterpart of `ReferenceModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from dflashc.compiler.models.config import ModelConfig
from dflashc.runtime.device_sampling import Word
from tests.reference.config import Weights
from tests.reference.relax_numpy import evaluate


@dataclass(frozen=True)
class Result:
    """Of rows of tokens: taps (rows, hidden), logits (rows, vocabulary) and the best ids (rows,)."""

    taps: list[np.ndarray]
    logits: np.ndarray
    ids: np.ndarray


class InterpretedModule:
    """The functions of a module, over weights and caches that they share.

    Parameters
    ----------
    inputs
        Weights, frequencies and caches by parameter name.
    forms, dtype
        See `evaluate`.
    """

    def __init__(
        self,
        module: tvm.IRModule,
        inputs: Mapping[str, np.ndarray],
        forms: Mapping[str, str] | None = None,
        dtype: type[np.floating] = np.float64,
    ) -> None:
        self._module, self._inputs, self._forms, self._dtype = module, inputs, forms, dtype
        self._has_positions = "positions" in [variable.name_hint for variable in module.functions]

    def run(self, function: str, rows: int, start_position: int = 0, **inputs: Any) -> Any:
        """Run a function on rows at positions start_position..."""
        state = np.zeros(8, np.int64)
        state[0] = start_position
        given = {**self._inputs, "tokens": np.zeros(rows, np.int32), "state": state,
                 "sampling": np.zeros(len(Word), np.int64), **inputs}
        if self._has_positions:  # the rope tables of all functions, in the order of their names
            positions = self._module["positions"]
            names = sorted(p.name.removesuffix(".frequencies") for p in positions.params if p.name.startswith("rope."))
            given |= zip(names, evaluate(positions, given, dtype=self._dtype), strict=True)
        return evaluate(self._module[function], given, self._forms, self._dtype)


def caches(layers: int, shape: tuple[int, int, int], dtype: type[np.floating]) -> dict[str, np.ndarray]:
    """Empty K and V caches of `shape` (KV heads, capacity, head size), by parameter name."""
    return {f"cache.{layer}.{which}": np.zeros(shape, dtype) for layer in range(layers) for which in "kv"}


class InterpretedModel:
    """The functions of a target model chained.

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
        self._functions = InterpretedModule(module, {
            **{name: weight.values for name, weight in weights.items()},
            **{f"rope.{rope.name}.frequencies": np.array(rope.frequencies) for rope in config.ropes},
            **caches(config.layers, (config.kv_heads, config.context_length, config.head_size), kv_dtype),
        }, forms, dtype)

    def forward(self, tokens: Sequence[int], start_position: int) -> Result:
        """Run tokens at positions start_position..."""
        rows, run = len(tokens), self._functions.run
        residual, *taps = run("decode", rows, start_position, tokens=np.array(tokens, np.int32))
        return Result(taps, run("logits", rows, hidden=residual), run("ids", rows, hidden=residual))
