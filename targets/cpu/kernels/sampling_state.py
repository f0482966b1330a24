"""What kernels that draw read of a request: its parameters, and the position that a row decides.

Knows nothing of what is drawn.
"""

from __future__ import annotations

from dflashc.runtime.device_sampling import Word
from dflashc.runtime.sampling import Purpose
from dflashc.targets.cpu.builder import Expr, bind, load, reinterpret
from dflashc.targets.cpu.kernels import random_numbers


def parameter(sampling: Expr, word: Word) -> Expr:
    """A float64 of the "sampling" buffer."""
    return bind(reinterpret("float64", load(sampling, word)))


def decided_position(state: Expr, row: Expr) -> Expr:
    """Position of the token that a head's row `row` decides: behind the n committed ones and the run's rows up to it.

    state[0] is n, state[1] the row of the run that is the head's first.
    """
    return bind(load(state, 0) + load(state, 1) + row + 1)


def random_number(sampling: Expr, purpose: Purpose, position: Expr) -> Expr:
    """The request's number in [0, 1), float64, see `runtime.sampling.uniform`."""
    seed = bind(reinterpret("uint64", load(sampling, Word.SEED)))
    return random_numbers.uniform(seed, purpose, position)
