"""The rotary tables on every feature level, against NumPy in extended precision."""

from __future__ import annotations

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.rope import rope_table
from dflashc.targets.requests import KernelRequest
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    return Library(request.param, [KernelRequest("rope_table", rope_table, ())], tmp_path_factory.mktemp("rope"))


def table(library: Library, start: int, rows: int, frequency: np.ndarray, magnitude: float) -> tuple[np.ndarray, ...]:
    """Cosine and sine as the kernel makes them, (rows, pairs)."""
    cosine, sine = (np.full((rows, frequency.size), np.nan, np.float32) for _ in range(2))
    library.run("rope_table", [np.array([start]), frequency, cosine, sine, frequency.size, magnitude], rows)
    return cosine, sine


@pytest.mark.parametrize("base", [1e4, 1e6, 5e8])
@pytest.mark.parametrize("start", [0, 1, 4095, 131072, 262144 - 64])
@pytest.mark.parametrize(("pairs", "magnitude"), [(64, 1.0), (20, 1.25), (5, 1.0)])
def test_accuracy(library: Library, base: float, start: int, pairs: int, magnitude: float) -> None:
    frequency = base ** (-np.arange(pairs, dtype=np.float64) / pairs)
    cosine, sine = table(library, start, 64, frequency, magnitude)
    angle = (start + np.arange(64))[:, None].astype(np.longdouble) * frequency
    np.testing.assert_allclose(cosine, np.cos(angle) * magnitude, rtol=0, atol=1e-7 * magnitude)
    np.testing.assert_allclose(sine, np.sin(angle) * magnitude, rtol=0, atol=1e-7 * magnitude)


def test_multiples_of_a_quarter_turn(library: Library) -> None:
    """Where the reduction changes its mind: every multiple of a quarter and an eighth of a turn, and its neighbours."""
    eighth = np.pi / 4
    frequency = np.array([np.nextafter(eighth, 0), eighth, np.nextafter(eighth, 1)])
    cosine, sine = table(library, 0, 4096, frequency, 1.0)
    angle = np.arange(4096)[:, None].astype(np.longdouble) * frequency
    np.testing.assert_allclose(cosine, np.cos(angle), rtol=0, atol=1e-7)
    np.testing.assert_allclose(sine, np.sin(angle), rtol=0, atol=1e-7)


def test_rows_do_not_depend_on_each_other(library: Library) -> None:
    frequency = 1e6 ** (-np.arange(64) / 64)
    together = table(library, 1000, 16, frequency, 1.0)
    for row in range(16):
        alone = table(library, 1000 + row, 1, frequency, 1.0)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a[row].view(np.uint32), b[0].view(np.uint32))
