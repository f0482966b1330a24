"""The candidate selector's walk against NumPy, greedy and drawn; and the best candidates of rows on their own."""

from __future__ import annotations

import numpy as np
import pytest

from dflashc.runtime.device_sampling import sampling_words
from dflashc.runtime.sampling import SamplingParameters
from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.selector import best_candidate, select_candidates
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import pack_rows, packed_format
from tests.reference.functions import softmax
from tests.targets.cpu.test_selector import COMMITTED, SEED, TABLES, Selector, Walk, expected_top
from tests.targets.gpu.running import run_kernel
from tests.targets.gpu.test_candidates import merged, top

TRAITS = Traits("vulkan", "generic")


class GpuSelector(Selector):
    """Runs a selector on a GPU."""

    def run(self, rows: int, count: int, temperature: float = 0.0) -> Walk:
        """Of the first `rows` rows, drawn at a temperature."""
        layouts = [packed_format(name).format.name for name in self.tables[:2]]
        packed = [pack_rows(name, b, self.rank, LANES).view(np.uint32)
                  for name, b in zip(self.tables[:2], self.blocks, strict=True)]
        words = sampling_words(SamplingParameters(seed=SEED), len(self.logits[0]), temperature).view(np.uint64)
        *_, ids, confidence, candidates, probabilities = run_kernel(
            select_candidates(TRAITS, count, *layouts),
            [*merged(*top(self.logits[:rows], count)), self.projected[:rows], self.block, np.array([COMMITTED, 0]),
             words, *packed, np.full(rows + 1, -1, np.int32), np.full(rows, np.nan, np.float32),
             np.full((rows, count), -1, np.int32), np.full((rows, count), np.nan), rows, self.rank, 1], 1)
        assert ids[0] == -1
        return Walk(ids[1:], confidence, candidates, probabilities)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("count", [8, 16, 20])
@pytest.mark.parametrize("tables", TABLES, ids=lambda t: "-".join(map(str, t)))
def test_walk(tables: tuple[str, str, int], count: int, temperature: float) -> None:
    """By formula; and the first rows of a block do not depend on how many follow."""
    selector = GpuSelector(tables, 700)
    walk, expected = selector.run(16, count, temperature), selector.expected(count, temperature)
    np.testing.assert_array_equal(walk.ids, expected.ids)
    np.testing.assert_array_equal(walk.candidates, expected.candidates)
    np.testing.assert_allclose(walk.confidence, expected.confidence, rtol=2e-5)
    np.testing.assert_allclose(walk.probabilities, expected.probabilities, rtol=1e-4)
    assert len(set(walk.ids) - {expected_top(row, 1)[0] for row in selector.logits}) > 0, "no edge changed a choice"
    for rows in (1, 2, 8):
        fewer = selector.run(rows, count, temperature)
        for name, values in vars(fewer).items():
            np.testing.assert_array_equal(values, getattr(walk, name)[:rows])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_edges_the_logits_decide(temperature: float) -> None:
    """Equal logits: the lowest id, with an even share; no number at all: id 0, which has no probability."""
    selector = GpuSelector(TABLES[0], 200)
    selector.projected[:] = 0
    selector.logits[0] = 1
    selector.logits[1] = np.nan
    selector.logits[2, :] = -np.inf
    selector.logits[2, 33] = 5
    walk = selector.run(16, 8, temperature)
    if not temperature:
        np.testing.assert_array_equal(walk.ids, [0, 0, 33, *selector.logits[3:].argmax(axis=1)])
    np.testing.assert_array_equal(walk.ids[1:3], [0, 33])
    np.testing.assert_array_equal(walk.probabilities[1:3, 0], [1, 1])
    np.testing.assert_allclose(walk.confidence[:3], [1 / 8, 0, 1], rtol=1e-6)


@pytest.mark.parametrize("count", [8, 10])
def test_best_candidate(count: int) -> None:
    """Ids and shares by formula; ties, and rows without a number."""
    logits = np.random.default_rng(3).standard_normal((6, 5000)).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2], logits[3] = np.nan, -np.inf
    *_, ids, confidence = run_kernel(
        best_candidate(TRAITS, count),
        [*merged(*top(logits, count)), np.full(7, -1, np.int32), np.full(6, np.nan, np.float32), 1], 6)
    assert ids[0] == -1
    for row in (0, 1, 4, 5):
        best = expected_top(logits[row], count)
        assert ids[row + 1] == best[0]
        np.testing.assert_allclose(confidence[row], softmax(logits[row][best].astype(np.float64))[0], rtol=1e-5)
    assert confidence[2:4].tolist() == [0, 0]
