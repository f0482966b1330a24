"""Acceptance, for every length of the accepted prefix."""

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.accept import accept
from dflashc.targets.gpu.traits import Traits
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32])
def test_longest_agreed_prefix(rows: int) -> None:
    kernel = accept(TRAITS)
    for agreed in range(rows):
        ids = np.arange(100, 100 + rows, dtype=np.int32)
        ids[-1] = -1  # the mark of broken logits is passed on like a token
        tokens = np.concatenate([np.array([5], np.int32), ids[:-1]])
        tokens[agreed + 1 : agreed + 2] = 7  # the first wrong proposal; those after it agree again, but do not count
        proposals = tokens[1:].copy()
        state, block = np.array([1000, 3]), np.array([5, 9], np.int32)
        emitted, history = np.full(rows + 2, -2, np.int32), np.full(1100, -2, np.int32)
        tokens, ids, state, block, history, emitted = run_kernel(
            kernel, [tokens, ids, state, block, history, emitted, rows], 1)
        assert emitted[0] == agreed
        np.testing.assert_array_equal(emitted[1 : agreed + 2], [*proposals[:agreed], ids[agreed]])
        assert (emitted[agreed + 2 :] == -2).all()
        np.testing.assert_array_equal(state, [1001 + agreed, 3])
        np.testing.assert_array_equal(history[1000 : 1001 + agreed], [5, *proposals[:agreed]])
        assert (np.delete(history, np.s_[1000 : 1001 + agreed]) == -2).all()
        np.testing.assert_array_equal(block, [ids[agreed], 9])
        assert tokens[0] == ids[agreed]
        np.testing.assert_array_equal(tokens[1:], proposals)
