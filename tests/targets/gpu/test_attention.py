"""Attention on a Vulkan device: against the formula in float64, and bit for bit between programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflashc.targets.gpu.traits import Traits
from tests.targets import samples
from tests.targets.attention_formula import Shape
from tests.targets.gpu.attention_case import Sequence

TRAITS = Traits("vulkan", "generic")
MAIN = Shape(2, 64, "neox", True)
SHAPES = [
    MAIN,
    Shape(7, 64, "neox", True, kv_heads=1),  # rows whose queries are spread over chunks of 8
    Shape(1, 128, "norm", False, kv_heads=3),
    Shape(3, 80, "neox", False, sinks=True),
    Shape(4, 256, "neox", True, kv_heads=1),
    Shape(5, 96, "norm", True, kv_heads=1),
]
IDS = [f"{shape.group}-{shape.suffix}" for shape in SHAPES]


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def assert_same_caches(a: Sequence, b: Sequence) -> None:
    assert_same_bits(a.packed_keys, b.packed_keys)
    assert_same_bits(a.packed_values, b.packed_values)


def assert_cache(sequence: Sequence) -> None:
    """K within a unit of float16's last place (its rounding sees float32's), V exact, nothing else touched."""
    keys, values = sequence.new_keys_values()
    new = slice(sequence.start, sequence.start + sequence.tokens)
    np.testing.assert_allclose(sequence.keys()[:, new], keys, rtol=2**-10, atol=2e-6)
    np.testing.assert_array_equal(sequence.values()[:, new], values.astype(np.float16))
    for stored, old in ((sequence.keys(), sequence.old_keys), (sequence.values(), sequence.old_values)):
        np.testing.assert_array_equal(stored[:, : new.start], old.astype(np.float16))
        assert np.isnan(stored[:, new.stop :]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize(("start", "window"), [(0, 0), (241, 0), (600, 300)])
def test_decode_verify_and_prefill_compute_the_formula(shape: Shape, start: int, window: int) -> None:
    """17 tokens, across a part's border: single rows, wider programs and prefill agree to the last bit."""
    decode, verify, prefill = (Sequence(TRAITS, shape, start, 17, window) for _ in range(3))
    output = decode.run([1] * 17)
    assert_cache(decode)
    np.testing.assert_allclose(output, decode.expected(), rtol=0, atol=4e-6)
    assert_same_bits(verify.run([5, 2, 10]), output)
    assert_same_bits(prefill.prefill(0, 17, 12), output)
    for other in (verify, prefill):
        assert_same_caches(other, decode)


def test_every_width() -> None:
    """64 rows of prefill, and the first of them in programs of 1 to 16 rows: the same bits."""
    prefill, verify = (Sequence(TRAITS, MAIN, 250, 64) for _ in range(2))
    output = prefill.prefill(0, 64, 64)
    assert_same_bits(verify.run([16] * 4), output)
    assert_same_caches(verify, prefill)
    for rows in range(1, 16):
        (found,) = Sequence(TRAITS, MAIN, 250, 64).verify(0, rows)
        assert_same_bits(found, output[:rows])


@pytest.mark.parametrize("window", [1, 31, 255, 256, 257, 5000])
def test_windows_around_parts(window: int) -> None:
    verify, prefill = (Sequence(TRAITS, MAIN, 505, 16, window) for _ in range(2))
    output = verify.run([16])
    np.testing.assert_allclose(output, verify.expected(), rtol=0, atol=4e-6)
    assert_same_bits(prefill.prefill(0, 16, 16), output)


@pytest.mark.parametrize("window", [0, 5000])
def test_slots_of_several_parts(window: int) -> None:
    """9,000 tokens of context are 36 parts for 16 slots, of which the window leaves 21."""
    verify, decode = (Sequence(TRAITS, MAIN, 9000, 8, window) for _ in range(2))
    output = verify.run([8])
    np.testing.assert_allclose(output, verify.expected(), rtol=0, atol=4e-6)
    assert_same_bits(decode.run([1] * 8), output)


def test_ring() -> None:
    """Caches of 512 tokens at position 1,500: a window of 200 and the rows being stored fit in."""
    ring = Sequence(TRAITS, MAIN, 1500, 40, 200, capacity=512)
    whole = Sequence(TRAITS, MAIN, 1500, 40, 200)
    output = ring.run([16, 16, 8])
    np.testing.assert_allclose(output, ring.expected(), rtol=0, atol=4e-6)
    assert_same_bits(whole.run([16, 16, 8]), output)


@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("window", [0, 100])
def test_rows_of_a_block_see_each_other(rows: int, window: int) -> None:
    block = Sequence(TRAITS, MAIN, 250, rows, window)
    (output,) = block.verify(0, rows, block=True)
    np.testing.assert_allclose(output, block.expected(block=True), rtol=0, atol=4e-6)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=IDS[:3])
@pytest.mark.parametrize("pairs", [1, 10, 16])
def test_dimensions_beyond_the_rotated_ones_pass_through(shape: Shape, pairs: int) -> None:
    sequence = Sequence(TRAITS, shape, 30, 8, pairs=pairs)
    output = sequence.run([8])
    assert_cache(sequence)
    np.testing.assert_allclose(output, sequence.expected(), rtol=0, atol=4e-6)


@pytest.mark.parametrize("shape", [MAIN, SHAPES[3]], ids=lambda s: s.suffix)
def test_merge_quantises(shape: Shape) -> None:
    plain, quantised = (Sequence(TRAITS, shape, 300, 5) for _ in range(2))
    (values,) = plain.verify(0, 5)
    found_buffers = quantised.verify(0, 5, "q8_32s")
    for found, expected in zip(found_buffers, samples.quantise(values, "q8_32s"), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_scores_of_any_size() -> None:
    """Scores of hundreds: one key takes all, exponentials of the others vanish, nothing overflows."""
    sequence = Sequence(TRAITS, MAIN, 280, 16)
    sequence.q_norm *= 100
    # float32's rounding of a score of some hundreds is an error of about 1e-4 in its exponential
    np.testing.assert_allclose(sequence.run([16]), sequence.expected(), rtol=0, atol=5e-4)


def test_sinks_of_any_size() -> None:
    """One far above the scores leaves nothing of the values, one far below takes nothing, to the last bit."""
    plain, *others = (Sequence(TRAITS, replace(MAIN, sinks=s), 300, 2) for s in (False, True, True))
    below, above = others
    below.sinks[:], above.sinks[:] = (-1e9, -np.inf, -300, -1e30), 1000
    assert_same_bits(below.run([2]), plain.run([2]))
    assert (above.run([2]) == 0).all()


@pytest.mark.parametrize("wrong", [1e30, np.inf, np.nan])
def test_a_row_that_overflows_spoils_no_other(wrong: float) -> None:
    """What a drafted row computes beyond float16 must not reach the rows before it."""
    sound, broken = (Sequence(TRAITS, MAIN, 250, 8) for _ in range(2))
    output = sound.run([8])
    broken.qkv[5:] = wrong
    assert_same_bits(broken.run([8])[:5], output[:5])
