"""The layers of a KV injection by the buffers that their caches lie in. For the rules of all targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dflashc.passes.operators import Expr
from dflashc.targets.context import Cache, ProgramContext


@dataclass(frozen=True)
class InjectedLayers:
    """Layers whose caches lie one behind the other: what `operators.kv_injection` has of them, and their capacity.

    Attributes
    ----------
    weights, caches : list
        Of K and V of the first layer, of the next one, …
    biases : list
        One per weight, or empty.
    norms : list
        One per layer.
    cache : Cache
        That of the first K.
    """

    weights: list[Expr]
    biases: list[Expr]
    norms: list[Expr]
    caches: list[Expr]
    cache: Cache


def layers_by_buffer(c: ProgramContext, weights: Sequence[Expr], biases: Sequence[Expr], norms: Sequence[Expr],
                     caches: Sequence[Expr]) -> list[InjectedLayers]:
    """Runs of layers that share a buffer; asks for the weights of each run to be stored side by side."""
    runs = []
    for _, numbers in groupby(range(len(norms)), lambda layer: c.cache(caches[2 * layer]).begin.name):
        layers = list(numbers)
        pairs = [2 * layer + i for layer in layers for i in range(2)]
        run = InjectedLayers([weights[i] for i in pairs], [biases[i] for i in pairs] if len(biases) else [],
                             [norms[layer] for layer in layers], [caches[i] for i in pairs], c.cache(caches[pairs[0]]))
        c.keep_adjacent([n.name for n in run.norms])
        c.keep_adjacent([b.name for b in run.biases])
        runs.append(run)
    return runs
