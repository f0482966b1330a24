"""What kernels that draw read of a request: its parameters, and the position that a row decides.

Knows nothing of what is drawn.
"""

from __future__ import annotations

from dflashc.runtime.device_sampling import Word
from dflashc.runtime.sampling import Purpose
from dflashc.targets.gpu.builder import Expr, bind, cast, load, reinterpret, state_word
from dflashc.targets.gpu.kernels.random_numbers import uniform


def number_of(sampling: Expr, word: Word) -> Expr:
    """A float64 word of the "sampling" buffer, which is declared uint64."""
    return bind(reinterpret("float64", load(sampling, int(word))))


def count_of(sampling: Expr, word: Word) -> Expr:
    """A word of the "sampling" buffer that counts, int32."""
    return bind(cast("int32", load(sampling, int(word))))


def position_of(state: Expr, row: Expr) -> Expr:
    """Position of the token that a head's row `row` decides: behind the n committed ones and the run's rows up to it.

    Word 0 of the state block is n, word 1 the row of the run that is the head's first.
    """
    return bind(state_word(state, 0) + state_word(state, 1) + row + 1)


def random_number(sampling: Expr, purpose: Purpose, position: Expr) -> Expr:
    """The request's number in [0, 1), float64, see `runtime.sampling.uniform`."""
    return uniform(bind(load(sampling, int(Word.SEED))), purpose, position)
