"""Attention on a Vulkan device: against the formula in float64, and bit for bit between programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflashc.targets.gpu.traits import Traits
from tests.targets import samples
from tests.targets.attention_formula import Shape, assert_formula, rounding, stored_as
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
    Shape(2, 64, "neox", True, kv="q8_0"),
    Shape(3, 128, "norm", False, kv_heads=1, sinks=True, kv="q8_0"),
    Shape(5, 256, "neox", True, kv_heads=1, kv="q8_0"),
]
MAINS = [MAIN, SHAPES[6]]
IDS = [f"{shape.group}-{shape.suffix}" for shape in SHAPES]


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def assert_same_caches(a: Sequence, b: Sequence) -> None:
    assert_same_bits(a.packed_keys, b.packed_keys)
    assert_same_bits(a.packed_values, b.packed_values)


def assert_cache(sequence: Sequence) -> None:
    """K within what its type rounds, and what float32 rounded before; V exact; nothing else touched."""
    keys, values = sequence.new_keys_values()
    new, kv = slice(sequence.start, sequence.start + sequence.tokens), sequence.shape.kv
    assert (np.abs(sequence.stored("k")[:, new] - keys) <= rounding(keys, kv) + 2e-6).all()
    np.testing.assert_array_equal(sequence.stored("v")[:, new], stored_as(values, kv))
    for which, old in (("k", sequence.old_keys), ("v", sequence.old_values)):
        stored = sequence.stored(which)
        np.testing.assert_array_equal(stored[:, : new.start], stored_as(old, kv))
        assert np.isnan(stored[:, new.stop :]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize(("start", "window"), [(0, 0), (241, 0), (600, 300)])
def test_decode_verify_and_prefill_compute_the_formula(shape: Shape, start: int, window: int) -> None:
    """17 tokens, across a part's border: single rows, wider programs and prefill agree to the last bit."""
    decode, verify, prefill = (Sequence(TRAITS, shape, start, 17, window) for _ in range(3))
    output = decode.run([1] * 17)
    assert_cache(decode)
    assert_formula(output, decode, decode.expected())
    assert_same_bits(verify.run([5, 2, 10]), output)
    assert_same_bits(prefill.prefill(0, 17, 12), output)
    for other in (verify, prefill):
        assert_same_caches(other, decode)


@pytest.mark.parametrize("main", MAINS, ids=lambda s: s.kv)
def test_every_width(main: Shape) -> None:
    """64 rows of prefill, and the first of them in programs of 1 to 16 rows: the same bits."""
    prefill, verify = (Sequence(TRAITS, main, 250, 64) for _ in range(2))
    output = prefill.prefill(0, 64, 64)
    assert_same_bits(verify.run([16] * 4), output)
    assert_same_caches(verify, prefill)
    for rows in range(1, 16):
        (found,) = Sequence(TRAITS, main, 250, 64).verify(0, rows)
        assert_same_bits(found, output[:rows])


@pytest.mark.parametrize("main", MAINS, ids=lambda s: s.kv)
@pytest.mark.parametrize("window", [1, 31, 255, 256, 257, 5000])
def test_windows_around_parts(main: Shape, window: int) -> None:
    verify, prefill = (Sequence(TRAITS, main, 505, 16, window) for _ in range(2))
    output = verify.run([16])
    assert_formula(output, verify, verify.expected())
    assert_same_bits(prefill.prefill(0, 16, 16), output)


@pytest.mark.parametrize("main", MAINS, ids=lambda s: s.kv)
@pytest.mark.parametrize("window", [0, 5000])
def test_slots_of_several_parts(main: Shape, window: int) -> None:
    """9,000 tokens of context are 36 parts for 16 slots, of which the window leaves 21."""
    verify, decode = (Sequence(TRAITS, main, 9000, 8, window) for _ in range(2))
    output = verify.run([8])
    assert_formula(output, verify, verify.expected())
    assert_same_bits(decode.run([1] * 8), output)


@pytest.mark.parametrize("main", MAINS, ids=lambda s: s.kv)
def test_ring(main: Shape) -> None:
    """Caches of 512 tokens at position 1,500: a window of 200 and the rows being stored fit in."""
    ring = Sequence(TRAITS, main, 1500, 40, 200, capacity=512)
    whole = Sequence(TRAITS, main, 1500, 40, 200)
    output = ring.run([16, 16, 8])
    assert_formula(output, ring, ring.expected())
    assert_same_bits(whole.run([16, 16, 8]), output)


@pytest.mark.parametrize("main", MAINS, ids=lambda s: s.kv)
@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("window", [0, 100])
def test_rows_of_a_block_see_each_other(main: Shape, rows: int, window: int) -> None:
    block = Sequence(TRAITS, main, 250, rows, window)
    (output,) = block.verify(0, rows, block=True)
    assert_formula(output, block, block.expected(block=True))


@pytest.mark.parametrize("shape", SHAPES[:3], ids=IDS[:3])
@pytest.mark.parametrize("pairs", [1, 10, 16])
def test_dimensions_beyond_the_rotated_ones_pass_through(shape: Shape, pairs: int) -> None:
    sequence = Sequence(TRAITS, shape, 30, 8, pairs=pairs)
    output = sequence.run([8])
    assert_cache(sequence)
    assert_formula(output, sequence, sequence.expected())


@pytest.mark.parametrize("main", MAINS, ids=lambda s: s.kv)
@pytest.mark.parametrize(("code", "arch"), [("cuda", "sm_89"), ("rocm", "gfx1151")])
def test_what_is_written_for_cuda_and_rocm(main: Shape, code: str, arch: str) -> None:
    sequence = Sequence(Traits(code, arch), main, 250, 8)
    output = sequence.run([8])
    assert_cache(sequence)
    assert_formula(output, sequence, sequence.expected())


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
    assert_formula(sequence.run([16]), sequence, sequence.expected(), 5e-4)


def test_sinks_of_any_size() -> None:
    """One far above the scores leaves nothing of the values, one far below takes nothing, to the last bit."""
    plain, *others = (Sequence(TRAITS, replace(MAIN, sinks=s), 300, 2) for s in (False, True, True))
    below, above = others
    below.sinks[:], above.sinks[:] = (-1e9, -np.inf, -300, -1e30), 1000
    assert_same_bits(below.run([2]), plain.run([2]))
    assert (above.run([2]) == 0).all()


@pytest.mark.parametrize("main", MAINS, ids=lambda s: s.kv)
@pytest.mark.parametrize("wrong", [1e30, np.inf, np.nan])
def test_a_row_that_overflows_spoils_no_other(main: Shape, wrong: float) -> None:
    """What a drafted row computes beyond float16 must not reach the rows before it."""
    sound, broken = (Sequence(TRAITS, main, 250, 8) for _ in range(2))
    output = sound.run([8])
    broken.qkv[5:] = wrong
    assert_same_bits(broken.run([8])[:5], output[:5])
