"""Attention on every feature level: against the formula in float64, and bit for bit between programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from dflashc.targets.cpu.compile import compile_objects
from dflashc.targets.cpu.kernels.activation import FORMS
from dflashc.targets.cpu.kernels.attention import heads_per_unit
from dflashc.targets.cpu.kernels.attention_tile import PART
from dflashc.targets.cpu.kernels.rope import rope_table
from dflashc.targets.cpu.traits import best_level, host_features
from dflashc.targets.requests import KernelRequest
from tests.targets.attention_formula import Shape, assert_formula, rounding, stored_as
from tests.targets.cpu.attention_case import Sequence, requests, suffix
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

MAIN = Shape(2, 64, "neox", True)
WIDTHS = {
    MAIN: (1, 4, 7, 16),
    replace(MAIN, kv="q8_0"): (1, 4, 7, 16),
    Shape(1, 128, "norm", False, kv_heads=3): (1, 5),
    Shape(3, 80, "neox", False, sinks=True): (1, 2),
    Shape(3, 32, "norm", False, kv="q8_0", sinks=True): (1, 2, 6),
    Shape(4, 256, "neox", True, kv_heads=1): (1, 3),
    Shape(4, 256, "neox", True, kv_heads=1, kv="q8_0"): (1, 3),
    Shape(5, 96, "norm", True, kv_heads=1): (1, 8),
    Shape(7, 64, "neox", False, kv_heads=1): (1, 9),
    Shape(8, 128, "norm", True, kv_heads=1, sinks=True): (1, 11),
    Shape(8, 96, "norm", True, kv_heads=1, kv="q8_0"): (1, 11),
}
SHAPES = list(WIDTHS)
MAINS = SHAPES[:2]
# The levels differ in their lanes, in FMA and in integer dot products.
SHAPES_OF = {"x86-64-v4-vnni": SHAPES, "x86-64-v3-vnni": MAINS, "x86-64-v3": SHAPES[:7], "x86-64": SHAPES[:5]}
CASES = [pytest.param(level, shape, id=f"{level}-{shape.group}-{suffix(shape)}")
         for level in LEVEL_NAMES for shape in SHAPES_OF[level]]

Libraries = Callable[[str, Shape], Library]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    """The kernels of a shape on a level, compiled at the first use."""
    @cache
    def library(level: str, shape: Shape) -> Library:
        require_level(level)
        forms = tuple(form for form in FORMS if shape.heads % heads_per_unit(shape.size, form) == 0)
        return Library(level, requests(shape, WIDTHS[shape], forms), tmp_path_factory.mktemp("attention"))

    return library


@pytest.fixture(params=[pytest.param((level, shape), id=f"{level}-{shape.kv}") for level in LEVEL_NAMES
                        for shape in MAINS])
def main(request: pytest.FixtureRequest, libraries: Libraries) -> Callable[..., Sequence]:
    """Sequences of the main shape, in every K/V type."""
    level, shape = request.param
    return partial(Sequence, libraries(level, shape), shape)


def widths_of(shape: Shape, tokens: int) -> list[int]:
    """Programs for `tokens` tokens: the widths of the shape in turn, then single rows."""
    widths = [w for w in WIDTHS[shape] if w > 1]
    chosen: list[int] = []
    while tokens - sum(chosen) >= max(widths):
        chosen.append(widths[len(chosen) % len(widths)])
    return chosen + [1] * (tokens - sum(chosen))


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def assert_cache(sequence: Sequence) -> None:
    """V exact; K within what its type rounds, and what float32 rounded before; nothing else touched."""
    keys, values = sequence.new_keys_values()
    new = slice(sequence.start, sequence.start + sequence.tokens)
    kv, written = sequence.shape.kv, sequence.stored("k")
    assert (np.abs(written[:, new] - keys) <= rounding(keys, kv) + 2e-6).all()
    np.testing.assert_array_equal(sequence.stored("v")[:, new], stored_as(values, kv))
    for stored in (written, sequence.stored("v")):
        assert np.isnan(stored[:, new.stop :]).all()
        assert np.isfinite(stored[:, : new.start]).all()


@pytest.mark.parametrize(("level", "shape"), CASES)
@pytest.mark.parametrize(("start", "window"), [(0, 0), (241, 0), (600, 300), (530, 20)])
def test_decode_verify_and_prefill_compute_the_formula(libraries: Libraries, level: str, shape: Shape, start: int,
                                                       window: int) -> None:
    """48 tokens, across a part's border: single rows, wider programs and prefill agree to the last bit."""
    def sequence() -> Sequence:
        return Sequence(libraries(level, shape), shape, start, 48, window)

    plain, verify, prefill = sequence(), sequence(), sequence()
    output = plain.run([1] * 48)
    assert_cache(plain)
    assert_formula(output, plain, plain.expected())
    assert_same_bits(verify.run(widths_of(shape, 48)), output)
    assert_same_bits(prefill.prefill(0, 48), output)
    for other in (verify, prefill):
        assert_same_bits(other.keys, plain.keys)
        assert_same_bits(other.values, plain.values)


@pytest.mark.parametrize("window", [1, 63, 64, 255, 256, 257, 5000])
def test_windows_around_tiles_and_parts(main: Callable[..., Sequence], window: int) -> None:
    verify, prefill = main(505, 16, window), main(505, 16, window)
    output = verify.run([16])
    assert_formula(output, verify, verify.expected())
    assert_same_bits(prefill.prefill(0, 16), output)


@pytest.mark.parametrize("window", [20, 256, 600])
def test_ring(main: Callable[..., Sequence], window: int) -> None:
    """Caches with just enough room for the window and the rows being stored give the bits of those that hold all."""
    capacity = -(-(window - 1 + 256) // PART) * PART

    def output(sequence: Sequence) -> np.ndarray:
        return np.concatenate([sequence.prefill(0, 256), sequence.run([16] * 4 + [7, 1] * 8, first=256),
                               sequence.prefill(384, 256)])

    whole, ring = main(1700, 640, window), main(1700, 640, window, capacity=capacity)
    assert_same_bits(output(ring), output(whole))
    assert_formula(output(whole), whole, whole.expected())


@pytest.mark.parametrize("shape", SHAPES[:3:2], ids=["neox", "norm"])
@pytest.mark.parametrize("pairs", [0, 10, 16, 32])
def test_dimensions_beyond_the_rotated_ones_pass_through(libraries: Libraries, shape: Shape, pairs: int) -> None:
    sequence = Sequence(libraries(best_level(host_features()).name, shape), shape, 30, 16, pairs=pairs)
    output = sequence.prefill(0, 16)
    assert_cache(sequence)
    assert_formula(output, sequence, sequence.expected())


@pytest.mark.parametrize("level", LEVEL_NAMES[::3])
@pytest.mark.parametrize(("shape", "form"), [(MAIN, "q8_32"), (MAIN, "q8_256"), (SHAPES[2], "q8_32"),
                                             (SHAPES[3], "q8_32")], ids=lambda x: getattr(x, "suffix", x))
def test_merge_quantises(libraries: Libraries, level: str, shape: Shape, form: str) -> None:
    rows, columns = max(WIDTHS[shape]), shape.heads * shape.size
    sequence = Sequence(libraries(level, shape), shape, 300, rows)
    values = sequence.verify(0, rows)
    outputs = [np.zeros(buffer.size(rows, columns), buffer.dtype) for buffer in FORMS[form].buffers]
    sequence.verify(0, rows, form, outputs)
    grouped = values.reshape(-1, FORMS[form].group)
    largest = np.abs(grouped).max(-1, keepdims=True)
    codes = np.rint(grouped * (np.float32(127) / largest)).astype(np.int8)
    np.testing.assert_array_equal(outputs[0], codes.reshape(-1))
    np.testing.assert_allclose(outputs[1], largest.reshape(-1) / 127, rtol=1e-6)
    sums = codes.reshape(-1, FORMS[form].buffers[2].group).sum(-1, dtype=np.int32)
    np.testing.assert_array_equal(outputs[2], sums)


def test_scores_of_any_size(main: Callable[..., Sequence]) -> None:
    """Scores of hundreds: one key takes all, exponentials of the others vanish, nothing overflows."""
    sequence = main(280, 16)
    sequence.q_norm *= 100
    output = sequence.run([16])
    # float32's rounding of a score of some hundreds is an error of about 1e-4 in its exponential
    assert_formula(output, sequence, sequence.expected(), 5e-4)


@pytest.mark.parametrize("shape", SHAPES[3:5], ids=["f16", "q8_0"])
def test_sinks_of_any_size(libraries: Libraries, shape: Shape, tmp_path: Path) -> None:
    """One far above the scores leaves nothing of the values, one far below takes nothing, to the last bit."""
    level = best_level(host_features()).name
    below, above = (Sequence(libraries(level, shape), shape, 300, 2) for _ in range(2))
    without = replace(shape, sinks=False)
    plain = Sequence(Library(level, requests(without, (2,)), tmp_path), without, 300, 2)
    below.sinks[:], above.sinks[:] = (-1e9, -np.inf, -300) * 2, 1000
    assert_same_bits(below.run([2]), plain.run([2]))
    assert (above.run([2]) == 0).all()


def test_depth(main: Callable[..., Sequence]) -> None:
    """32,000 tokens of context; one part after the other must not lose accuracy."""
    verify, prefill = main(32000, 16), main(32000, 16)
    output = verify.run([16])
    assert_formula(output, verify, verify.expected())
    assert_same_bits(prefill.prefill(0, 16), output)


@pytest.mark.parametrize("shape", MAINS, ids=lambda s: s.kv)
def test_every_width(shape: Shape, tmp_path: Path) -> None:
    """Widths 1 to 16 on the best level of this CPU: all rows as if computed alone."""
    library = Library(best_level(host_features()).name, requests(shape, tuple(range(1, 17))), tmp_path)
    alone, together = (Sequence(library, shape, 250, 136) for _ in range(2))
    output = alone.run([1] * 136)
    assert_formula(output, alone, alone.expected())
    assert_same_bits(together.run(range(1, 17)), output)
    assert_same_bits(together.keys, alone.keys)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_no_library_calls(level: str, tmp_path: Path) -> None:
    """The objects ask for memcpy and memset at most; needs no CPU of that level."""
    nm = shutil.which("nm") or pytest.skip("nm of binutils is not there to list the objects' symbols")
    kernels = [*(r for shape in MAINS for r in requests(shape, (3,), ("q8_256",))),
               KernelRequest("rope_table", rope_table, ())]
    for path in compile_objects(level, kernels, tmp_path, with_executor=False):
        listing = subprocess.run([nm, "-u", str(path)], capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"U (\S+)", listing)) <= {"memcpy", "memset"}
