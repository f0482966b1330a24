"""Acceptance, for every length of the accepted prefix."""

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.accept import accept
from dflashc.targets.requests import KernelRequest
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    return Library(request.param, [KernelRequest("accept", accept, ())], tmp_path_factory.mktemp("accept"))


@pytest.mark.parametrize(("rows", "agreed"), [(rows, k) for rows in (1, 2, 7, 8, 16, 17) for k in range(rows)])
def test_longest_agreed_prefix(library: Library, rows: int, agreed: int) -> None:
    ids = np.arange(100, 100 + rows, dtype=np.int32)
    tokens = np.concatenate([np.array([5], np.int32), ids[:-1]])
    tokens[agreed + 1 : agreed + 2] = 7  # the first wrong proposal; those after it agree again, which must not count
    proposals = tokens[1:].copy()
    state, block = np.array([1000, 3]), np.array([5, 9], np.int32)
    emitted, history = np.full(rows + 2, -1, np.int32), np.full(1100, -1, np.int32)
    library.run("accept", [tokens, ids, state, block, history, emitted, rows], 1)
    assert emitted[0] == agreed
    np.testing.assert_array_equal(emitted[1 : agreed + 2], [*proposals[:agreed], ids[agreed]])
    assert (emitted[agreed + 2 :] == -1).all()
    np.testing.assert_array_equal(state, [1001 + agreed, 3])
    np.testing.assert_array_equal(history[1000 : 1001 + agreed], [5, *proposals[:agreed]])
    assert (np.delete(history, np.s_[1000 : 1001 + agreed]) == -1).all()
    np.testing.assert_array_equal(block, [ids[agreed], 9])
    assert tokens[0] == ids[agreed]
    np.testing.assert_array_equal(tokens[1:], proposals)
