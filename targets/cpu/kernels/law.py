"""A law over few places: probabilities from logits, and the place that a random number picks.

Sums run from the first place on in float64, and no operation is fused: every feature level draws the same. Knows
nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, const, i64, load, local, store
from dflashc.targets.cpu.kernels.vector_math import exp_double, select

_F64 = "float64"


@dataclass(frozen=True)
class Law:
    """Probabilities, float64, of the first `left` places."""

    left: Expr
    probability: Expr

    @classmethod
    def declare(cls, most: int) -> Law:
        """A law over at most so many places."""
        return cls(local(1, "int64"), local(most, _F64))

    def keep(self, count: Expr) -> None:
        """Leave the first `count` places, whose probabilities are to be set."""
        store(self.left, 0, count)

    def places(self) -> Expr:
        """The loop over what is left."""
        return T.serial(i64(0), bind(load(self.left, 0)))

    def share(self, place: Expr) -> Expr:
        return load(self.probability, place)

    def weigh(self, logit: Callable[[Expr], Expr], largest: Expr, temperature: Expr) -> Expr:
        """Take the softmax of the logits over `temperature`; returns its denominator, which is no number from 1 on
        where a logit is none.

        Parameters
        ----------
        logit : of a place, float64
        largest : the largest of them
        """
        total = local(1, _F64)
        store(total, 0, const(0, _F64))
        with self.places() as place:
            weight = exp_double(bind((logit(place) - largest) / temperature))
            store(self.probability, place, weight)
            store(total, 0, load(total, 0) + weight)
        sum_of_all = bind(load(total, 0))
        with self.places() as place:
            store(self.probability, place, load(self.probability, place) / sum_of_all)
        return sum_of_all

    def concentrate(self, on: Expr) -> None:
        """Give all to one place."""
        with self.places() as place:
            store(self.probability, place, select(place == on, const(1, _F64), const(0, _F64)))

    def draw(self, number: Expr) -> Expr:
        """The place whose share of [0, 1) holds `number`; shares need not add up to 1, and empty ones hold none."""
        total, reached, found = local(1, _F64), local(1, _F64), local(1, "int64")
        store(total, 0, const(0, _F64))
        with self.places() as place:
            store(total, 0, load(total, 0) + load(self.probability, place))
        whole = bind(load(total, 0))
        bound = bind(number * whole)
        store(reached, 0, const(0, _F64))
        store(found, 0, i64(-1))
        with self.places() as place:
            store(reached, 0, load(reached, 0) + load(self.probability, place))
            ends = tirx.any(load(reached, 0) > bound, load(reached, 0) >= whole)
            with T.If(tirx.all(load(found, 0) < i64(0), ends)), T.Then():
                store(found, 0, place)
        return bind(tirx.max(load(found, 0), i64(0)))
