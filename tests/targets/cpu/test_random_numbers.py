"""Random numbers against the host's, bit for bit; and the exponential that turns logits into probabilities."""

from pathlib import Path

import numpy as np
import pytest

from dflashc.runtime.sampling import Purpose, uniform
from dflashc.targets.cpu.builder import Kernel, KernelBuilder, bind, load, reinterpret, store
from dflashc.targets.cpu.kernels import random_numbers
from dflashc.targets.cpu.kernels.vector_math import exp_double
from dflashc.targets.cpu.traits import GENERIC, Traits
from dflashc.targets.requests import KernelRequest
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

POINTS = np.concatenate([-np.arange(0, 760, 0.37), -np.random.default_rng(0).random(20_000) * 40, [-0.0, -np.inf]])


def uniform_numbers(traits: Traits, purpose: int) -> Kernel:
    """Unit = a number: seeds int64, positions int64, numbers float64."""
    k = KernelBuilder(f"uniform_numbers_{purpose}", traits)
    with k.build():
        seeds, positions = k.buffer("seeds", "int64"), k.buffer("positions", "int64")
        numbers = k.buffer("numbers", "float64")
        with k.units() as i:
            seed = bind(reinterpret("uint64", load(seeds, i)))
            store(numbers, i, random_numbers.uniform(seed, purpose, bind(load(positions, i))))
    return k.kernel


def exponentials(traits: Traits) -> Kernel:
    """Unit = a number: x float64, y float64."""
    k = KernelBuilder("exponentials", traits)
    with k.build():
        x, y = k.buffer("x", "float64"), k.buffer("y", "float64")
        with k.units() as i:
            store(y, i, exp_double(bind(load(x, i))))
    return k.kernel


def compiled(level: str, folder: Path) -> Library:
    return Library(level, [*(KernelRequest(f"uniform_{p}", uniform_numbers, (int(p),)) for p in Purpose),
                           KernelRequest("exp", exponentials, ())], folder)


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    return compiled(request.param, tmp_path_factory.mktemp("random"))


def exponential(library: Library) -> np.ndarray:
    values = np.full(POINTS.size, np.nan)
    library.run("exp", [POINTS, values], POINTS.size)
    return values


@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_of_the_host(library: Library, purpose: Purpose) -> None:
    rng = np.random.default_rng(int(purpose))
    edges = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    seeds = np.concatenate([edges, rng.integers(0, 2**64, 500, np.uint64, endpoint=False)])
    positions = np.concatenate([[0, 1, 2**32 - 1, 2**32], rng.integers(0, 2**20, 500)])
    numbers = np.full(seeds.size, np.nan)
    library.run(f"uniform_{purpose}", [seeds.view(np.int64), positions, numbers], seeds.size)
    assert numbers.tolist() == [uniform(int(s), int(p), purpose) for s, p in zip(seeds, positions, strict=True)]


def test_exponential(library: Library) -> None:
    expected = np.exp(POINTS.astype(np.longdouble)).astype(np.float64)
    assert (np.abs(exponential(library) - expected) <= 2 * np.spacing(expected)).all()
    assert exponential(library)[-2:].tolist() == [1, 0]


def test_every_level_has_the_same_exponential(library: Library, tmp_path: Path) -> None:
    generic = compiled(GENERIC.name, tmp_path)
    np.testing.assert_array_equal(exponential(library).view(np.int64), exponential(generic).view(np.int64))
