"""The reduction of greedy heads' partial results."""

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.argmax import argmax_reduce
from dflashc.targets.gpu.traits import Traits
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")


@pytest.mark.parametrize("count", [1, 7, 256, 1000])
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_best_of_all_parts(rows: int, count: int) -> None:
    """Few distinct values, so that most rows have ties, the indices in falling order; and a row without any number."""
    rng = np.random.default_rng(count)
    value = rng.integers(0, 5, (count, rows)).astype(np.float32)
    value[:, -1] = -np.inf
    index = np.arange(32 * count, 0, -32, dtype=np.int32)[:, None] - rng.integers(1, 32, (count, rows), np.int32)
    *_, ids = run_kernel(argmax_reduce(TRAITS),
                         [value, index, np.full(rows + 1, -7, np.int32), count, rows, 1], rows)
    expected = np.where(value == value.max(axis=0), index, 2**31 - 1).min(axis=0)
    np.testing.assert_array_equal(ids, [-7, *expected])
