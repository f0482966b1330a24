"""The rotary tables on a Vulkan device, against NumPy in extended precision."""

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.rope import rope_groups, rope_table
from dflashc.targets.gpu.traits import Traits
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")


def table(start: int, rows: int, frequency: np.ndarray, magnitude: float = 1.0) -> np.ndarray:
    """Cosines and sines as the kernel makes them, (2, rows, pairs)."""
    state = np.array([start, 5]).view(np.int32)
    output = np.full((2, rows, frequency.size), np.nan, np.float32)
    return run_kernel(rope_table(TRAITS), [state, frequency, output, rows, frequency.size, magnitude],
                      rope_groups(rows, frequency.size))[-1]


def expected(start: int, rows: int, frequency: np.ndarray) -> np.ndarray:
    angle = (start + np.arange(rows))[:, None].astype(np.longdouble) * frequency
    return np.stack([np.cos(angle), np.sin(angle)])


@pytest.mark.parametrize("base", [1e4, 5e8])
@pytest.mark.parametrize("start", [0, 4095, 262144 - 64, (1 << 20) - 64])
@pytest.mark.parametrize(("pairs", "magnitude"), [(64, 1.0), (5, 1.25)])
def test_accuracy(base: float, start: int, pairs: int, magnitude: float) -> None:
    frequency = base ** (-np.arange(pairs, dtype=np.float64) / pairs)
    np.testing.assert_allclose(table(start, 64, frequency, magnitude), expected(start, 64, frequency) * magnitude,
                               rtol=0, atol=1.5e-7 * magnitude)


def test_multiples_of_a_quarter_turn() -> None:
    """Where the reduction changes its mind: every multiple of a quarter and an eighth of a turn, and its neighbours."""
    eighth = np.pi / 4
    frequency = np.array([np.nextafter(eighth, 0), eighth, np.nextafter(eighth, 1)])
    np.testing.assert_allclose(table(0, 4096, frequency), expected(0, 4096, frequency), rtol=0, atol=1.5e-7)


def test_rows_do_not_depend_on_each_other() -> None:
    frequency = 1e6 ** (-np.arange(20) / 20)
    together = table(1000, 16, frequency)
    for row in range(16):
        np.testing.assert_array_equal(table(1000 + row, 1, frequency)[:, 0], together[:, row])
