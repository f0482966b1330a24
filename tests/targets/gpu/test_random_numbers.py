"""Random numbers against the host's, bit for bit; and the exponential that turns logits into probabilities."""

from pathlib import Path

import numpy as np
import pytest
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.sampling import Purpose, uniform
from dflashc.targets.cpu.traits import GENERIC
from dflashc.targets.gpu.builder import Kernel, KernelBuilder, bind, load, store
from dflashc.targets.gpu.kernels import random_numbers
from dflashc.targets.gpu.kernels.double_precision import exp_double
from dflashc.targets.gpu.traits import Traits
from tests.targets.cpu.test_random_numbers import POINTS, compiled, exponential
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")


def uniform_numbers(purpose: int) -> Kernel:
    """A thread = a number: seeds uint64, positions int32, numbers float64, count."""
    k = KernelBuilder(f"uniform_numbers_{purpose}", TRAITS)
    with k.build([("seeds", "uint64"), ("positions", "int32"), ("numbers", "float64"), ("count", "i32")]) as (
            seeds, positions, numbers, count), k.workgroups(64) as (group, thread):
        i = bind(group * 64 + thread)
        with T.If(i < count), T.Then():
            store(numbers, i, random_numbers.uniform(bind(load(seeds, i)), purpose, bind(load(positions, i))))
    return k.kernel


def exponentials() -> Kernel:
    """A thread = a number: x float64, y float64, count."""
    k = KernelBuilder("exponentials", TRAITS)
    with k.build([("x", "float64"), ("y", "float64"), ("count", "i32")]) as (x, y, count), \
            k.workgroups(64) as (group, thread):
        i = bind(group * 64 + thread)
        with T.If(i < count), T.Then():
            store(y, i, exp_double(bind(load(x, i))))
    return k.kernel


@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_of_the_host(purpose: Purpose) -> None:
    rng = np.random.default_rng(int(purpose))
    edges = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    seeds = np.concatenate([edges, rng.integers(0, 2**64, 500, np.uint64, endpoint=False)])
    positions = np.concatenate([[0, 1, 2**20, 2**31 - 1], rng.integers(0, 2**20, 500)]).astype(np.int32)
    *_, numbers = run_kernel(uniform_numbers(purpose), [seeds, positions, np.full(seeds.size, np.nan), seeds.size],
                             -(-seeds.size // 64))
    assert numbers.tolist() == [uniform(int(s), int(p), purpose) for s, p in zip(seeds, positions, strict=True)]


def test_exponential(tmp_path: Path) -> None:
    """The CPU's bits, which are within 2 ulp of the truth; results that are denormal may be 0."""
    _, found = run_kernel(exponentials(), [POINTS, np.full(POINTS.size, np.nan), POINTS.size], -(-POINTS.size // 64))
    expected = exponential(compiled(GENERIC.name, tmp_path))
    normal = expected >= np.finfo(np.float64).tiny
    np.testing.assert_array_equal(found[normal].view(np.int64), expected[normal].view(np.int64))
    assert (np.abs(found[~normal] - expected[~normal]) < np.finfo(np.float64).tiny).all()
