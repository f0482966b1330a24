"""The best logits of each segment and of each row, against a sort."""

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.candidates import SEGMENT, merge_candidates, segments_of, top_candidates
from dflashc.targets.gpu.traits import Traits
from tests.targets.cpu.test_selector import expected_top
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")


def top(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and ids of every segment, (M, segments, count)."""
    rows, columns = logits.shape
    segments = segments_of(columns)
    *_, value, index = run_kernel(
        top_candidates(TRAITS, count), [logits, np.full((rows, segments, count), 77, np.float32),
                                        np.full((rows, segments, count), 77, np.int32), columns], rows * segments)
    return value, index


def merged(value: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and ids of every row, (M, count)."""
    rows, segments, count = value.shape
    *_, best, token = run_kernel(
        merge_candidates(TRAITS, count), [value, index, np.full((rows, count), 77, np.float32),
                                          np.full((rows, count), 77, np.int32), segments], rows)
    return best, token


def awkward_logits(columns: int) -> np.ndarray:
    """Random logits, few distinct ones, rising and falling ones, NaN and infinities among them, nothing else."""
    rng = np.random.default_rng(columns)
    logits = rng.standard_normal((6, columns)).astype(np.float32)
    logits[1] = rng.integers(0, 3, columns)
    logits[2] = np.arange(columns)
    logits[3] = -logits[2]
    logits[4, ::2] = np.nan
    logits[4, 1] = np.inf
    logits[5] = np.nan
    return logits


@pytest.mark.parametrize("columns", [5, SEGMENT, 2 * SEGMENT + 77])
@pytest.mark.parametrize("count", [1, 10, 16, 64])
def test_best_of_every_segment_and_row(count: int, columns: int) -> None:
    logits = awkward_logits(columns)
    value, index = top(logits, count)
    best, token = merged(value, index)
    for row, line in enumerate(logits):
        for segment in range(segments_of(columns)):
            first = segment * SEGMENT
            check(value[row, segment], index[row, segment], line,
                  first + expected_top(line[first : first + SEGMENT], count))
        check(best[row], token[row], line, expected_top(line, count))


def check(value: np.ndarray, index: np.ndarray, line: np.ndarray, expected: np.ndarray) -> None:
    """Places without a candidate hold (-inf, 0)."""
    padding = len(value) - len(expected)
    np.testing.assert_array_equal(index, [*expected, *[0] * padding])
    np.testing.assert_array_equal(value, [*line[expected], *[-np.inf] * padding])


@pytest.mark.parametrize("count", [16, 64, 1000])
def test_more_segments_than_one_merge_holds(count: int) -> None:
    """Lists of 150 segments, as 300,000 logits give; and lists so long that two fill the shared memory."""
    rng = np.random.default_rng(count)
    segments = 150 if count < 1000 else 5
    value = -np.sort(-rng.integers(0, 40_000, (2, segments, count)).astype(np.float32), axis=2)
    index = np.arange(2 * segments * count, dtype=np.int32).reshape(value.shape)
    best, token = merged(value, index)
    for row in range(2):
        order = np.lexsort((index[row].ravel(), -value[row].ravel()))[:count]
        np.testing.assert_array_equal(token[row], index[row].ravel()[order])
        np.testing.assert_array_equal(best[row], value[row].ravel()[order])
