"""The candidate selector's walk against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.selector import select_candidates
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import pack_rows, packed_format
from tests.targets.cpu.test_selector import TABLES, Selector, expected_top
from tests.targets.gpu.running import run_kernel
from tests.targets.gpu.test_candidates import merged, top


class GpuSelector(Selector):
    """Runs a selector on a GPU."""

    def run(self, rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and probabilities of the first `rows` rows."""
        layouts = [packed_format(name).format.name for name in self.tables[:2]]
        packed = [pack_rows(name, b, self.rank, LANES).view(np.uint32)
                  for name, b in zip(self.tables[:2], self.blocks, strict=True)]
        best, token = merged(*top(self.logits[:rows], count))
        *_, ids, probability = run_kernel(
            select_candidates(Traits("vulkan", "generic"), count, *layouts),
            [best, token, self.projected[:rows], self.block, *packed, np.full(rows + 1, -1, np.int32),
             np.full(rows, np.nan, np.float32), rows, self.rank, 1], 1)
        assert ids[0] == -1
        return ids[1:], probability


@pytest.mark.parametrize("count", [8, 16, 20])
@pytest.mark.parametrize("tables", TABLES, ids=lambda t: "-".join(map(str, t)))
def test_walk(tables: tuple[str, str, int], count: int) -> None:
    """By formula; and the first rows of a block do not depend on how many follow."""
    selector = GpuSelector(tables, 700)
    ids, probability = selector.run(16, count)
    expected_ids, expected_probability = selector.expected(count)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(probability, expected_probability, rtol=2e-5)
    assert len(set(ids) - {expected_top(row, 1)[0] for row in selector.logits}) > 0, "no edge changed a choice"
    for rows in (1, 2, 8):
        fewer_ids, fewer = selector.run(rows, count)
        np.testing.assert_array_equal(fewer_ids, ids[:rows])
        np.testing.assert_array_equal(fewer, probability[:rows])


def test_without_edges_the_best_logit_wins() -> None:
    """Equal logits: the lowest id, with an even share; no number at all: id 0, which has no probability."""
    selector = GpuSelector(TABLES[0], 200)
    selector.projected[:] = 0
    selector.logits[0] = 1
    selector.logits[1] = np.nan
    selector.logits[2, :] = -np.inf
    selector.logits[2, 33] = 5
    ids, probability = selector.run(16, 8)
    np.testing.assert_array_equal(ids[3:], selector.logits[3:].argmax(axis=1))
    np.testing.assert_array_equal(ids[:3], [0, 0, 33])
    np.testing.assert_allclose(probability[:3], [1 / 8, 0, 1], rtol=1e-6)
