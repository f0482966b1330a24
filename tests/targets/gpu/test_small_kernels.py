"""Small kernels against NumPy: what the code generators write has to mean what TIR means.

For Vulkan on a device, for CUDA and ROCm on threads of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dflashc.targets.gpu.builder import Kernel
from dflashc.targets.gpu.traits import Traits
from tests.targets.gpu import small_kernels as kernels
from tests.targets.gpu.emulation import run_anywhere

GROUPS = 3
COUNT = GROUPS * kernels.THREADS
ARCHITECTURES = {"vulkan": "generic", "vulkan-packed": "gfx1151", "cuda": "sm_89", "rocm": "gfx1151"}
RANDOM = np.random.default_rng(7)

Run = Callable[[Callable[[Traits], Kernel], Sequence[np.ndarray | float]], list[np.ndarray]]
"""run(builder, arguments): the kernel's buffers afterwards."""


@pytest.fixture(params=ARCHITECTURES)
def run(request: pytest.FixtureRequest) -> Run:
    traits = Traits(request.param.partition("-")[0], ARCHITECTURES[request.param])
    return lambda builder, arguments: run_anywhere(traits, builder(traits), arguments, GROUPS)


def test_scalars_come_after_buffers_and_threads_outside_do_nothing(run: Run) -> None:
    x, y = RANDOM.standard_normal(COUNT).astype(np.float32), np.zeros(COUNT, np.float32)
    _, result = run(kernels.scale, [x, COUNT - 5, y, 0.3])
    assert np.array_equal(result[:-5], x[:-5] * np.float32(0.3))
    assert not result[-5:].any()


def test_workgroup_memory_is_summed_in_the_order_of_the_tree(run: Run) -> None:
    x = RANDOM.standard_normal(COUNT).astype(np.float32)
    _, result = run(kernels.block_sum, [x, np.zeros(GROUPS, np.float32)])
    level = x.reshape(GROUPS, -1)
    while level.shape[1] > 1:
        level = level[:, : level.shape[1] // 2] + level[:, level.shape[1] // 2 :]
    assert np.array_equal(result, level[:, 0])


def test_dot_products_of_bytes(run: Run) -> None:
    x, w = RANDOM.integers(-128, 128, (2, COUNT, 16), np.int8)
    x[0], w[0] = -128, -128
    *_, result = run(kernels.dot_rows, [x.view(np.int32), w.view(np.int32), np.zeros(COUNT, np.int32)])
    assert np.array_equal(result, (x.astype(np.int32) * w).sum(1))


def test_halves_round_to_even_and_keep_small_and_special_values(run: Run) -> None:
    x = RANDOM.standard_normal(COUNT).astype(np.float32) * np.float32(100)
    x[:8] = [1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, -np.inf, 2**-24, 2**-25, 0.1]
    bits = RANDOM.integers(0, 0x7C00, COUNT).astype(np.uint16)
    bits[:3] = [0x7C00, 0xFC00, 1]
    zeros = np.zeros(COUNT, np.float32)
    _, y, _, z, w = run(kernels.halves, [x, zeros.astype(np.float16), bits, zeros, zeros])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    assert np.array_equal(y, expected)
    assert np.array_equal(z, expected.astype(np.float32))
    assert np.array_equal(w, bits.view(np.float16).astype(np.float32))


def test_numbers_of_64_bits(run: Run) -> None:
    seed, x = RANDOM.integers(0, 1 << 64, COUNT, np.uint64), RANDOM.standard_normal(COUNT)
    i = np.arange(COUNT)
    _, y, _, z, s = run(kernels.wide, [seed, np.zeros(COUNT, np.uint64), x, np.zeros(COUNT),
                                                       np.zeros(COUNT, np.int64)])
    assert np.array_equal(y, (seed & np.uint64(0xFFFFFFFF)) * np.uint64(0x9E3779B9) ^ seed >> np.uint64(29))
    assert np.array_equal(z, x * (1 / 3) + i)
    assert np.array_equal(s, i * -(1 << 40))


def test_small_integers_divide_as_tir_says(run: Run) -> None:
    x = np.concatenate([np.arange(-96, 95), [127]]).astype(np.int8)
    outputs = [np.zeros(COUNT, t) for t in (np.int8, np.int8, np.int8, np.int8, np.int16, np.uint8)]
    found = run(kernels.small_integers, [x, *outputs])
    _, floored, remainder, eighth, low, truncated, top = found
    wide = x.astype(np.int32)
    assert np.array_equal(floored, wide // -7)
    assert np.array_equal(remainder, wide % -7)
    assert np.array_equal(eighth, wide // 8)
    assert np.array_equal(low, wide % 8)
    assert np.array_equal(truncated, np.trunc(wide / -3))
    assert np.array_equal(top, np.where(x < 0, 255, 0))


def test_loops_and_words_that_languages_reserve(run: Run) -> None:
    x = RANDOM.integers(-2, 60, COUNT).astype(np.int32)
    _, steps, sums = run(kernels.control, [x, np.zeros_like(x), np.zeros_like(x), 100])
    assert np.array_equal(sums, [sum(range(2, n)) for n in x])
    assert np.array_equal(steps, [collatz(int(n)) for n in x])


def collatz(n: int) -> int:
    steps = 0
    while n > 1 and steps < 100:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps


def test_floats_are_what_the_source_says(run: Run) -> None:
    """Nothing fused but `fma`, nothing assumed of infinities and NaN, constants exact."""
    a, b, c = RANDOM.standard_normal((3, COUNT)).astype(np.float32)
    a[:4] = [np.nan, np.inf, -np.inf, 2.5]
    _, _, _, y = run(kernels.floats, [a, b, c, np.zeros((COUNT, 12), np.float32)])
    with np.errstate(invalid="ignore"):
        expected = [a * b + c, None, (a * np.float32(0.1)) * np.float32(1e-30), a - a,
                    np.where(a < b, a, np.float32(-np.inf)), np.isnan(a), np.full(COUNT, np.inf), np.rint(a), abs(a),
                    np.floor(a), np.maximum(b, c), None]
    for index, values in enumerate(expected):
        if values is not None:
            assert np.array_equal(y[:, index], values, equal_nan=True), index
    assert np.allclose(y[:, 11], np.sqrt(abs(b)), rtol=2e-7)
    assert np.allclose(y[4:, 1], (a.astype(np.float64) * b + c)[4:], rtol=1e-6)


def test_threads_see_after_a_barrier_what_others_stored_before(run: Run) -> None:
    x, y = np.zeros((2, COUNT), np.int32)
    x, _ = run(kernels.exchange, [x, y, 1000])
    assert np.array_equal(x.reshape(GROUPS, -1), 1000 + np.arange(COUNT).reshape(GROUPS, -1)[:, ::-1])


def test_names_that_stand_for_names(run: Run) -> None:
    (y,) = run(kernels.names, [np.zeros(COUNT, np.int32)])
    value = np.arange(COUNT)
    for _ in range(40):
        value = np.where(value > np.arange(COUNT) % kernels.THREADS, value // 2 + np.arange(COUNT) % kernels.THREADS,
                         2 * value + 1)
    assert np.array_equal(y, value)
