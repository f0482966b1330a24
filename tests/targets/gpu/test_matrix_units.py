"""Matmuls by matrix units, as written for CUDA and ROCm, on units emulated by their manuals' layouts.

They give what dot products of four bytes give, bit for bit, and so what NumPy gives.
"""

import re
from functools import partial

import numpy as np
import pytest

from dflashc.targets.cuda import nvrtc
from dflashc.targets.cuda.source import kernel_source, translation_unit
from dflashc.targets.gpu.kernels.matmul import matmul
from dflashc.targets.gpu.kernels.shares import Share
from dflashc.targets.gpu.matrix_units import matrix_unit
from dflashc.targets.gpu.requests import share_of_matmul
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import packed_format
from dflashc.targets.rocm.ir import kernel_ir
from tests.targets import samples
from tests.targets.cpu.test_kv_linear import Parameters
from tests.targets.gpu import test_convolution as convolution
from tests.targets.gpu.building import require_toolchain
from tests.targets.gpu.emulation import run_emulated
from tests.targets.gpu.matmul_case import Case, GatedCase
from tests.targets.gpu.test_kv_injection import ALL, Injection

CODES = [t for t in samples.TYPE_NAMES if packed_format(t).format.family != "float"]
TILE, DOT = Share(64, 2, "matrix"), Share(16, 1)
UNITS = [Traits("cuda", "sm_89", most_threads=1024), Traits("rocm", "gfx1151", most_threads=1024),
         Traits("rocm", "gfx1201", most_threads=1024)]

units = pytest.mark.parametrize("traits", UNITS, ids=[t.arch for t in UNITS])


@units
@pytest.mark.parametrize("type_name", CODES)
def test_products(type_name: str, traits: Traits) -> None:
    """37 weight rows: the last row group of the first unit is cut, the second unit is not there."""
    case = Case(type_name, traits=traits)
    expected, found = case.expected(), case.run(TILE)
    np.testing.assert_allclose(found, expected, atol=4e-6 * np.abs(expected).max(), rtol=0)
    np.testing.assert_array_equal(found, case.run(DOT, 64))


@units
@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K", "Q4_K", "Q2_K"])
def test_extreme_integers(type_name: str, byte: int, traits: Traits) -> None:
    """Largest codes against activations of +-127 throughout: every integer must be exact as a float."""
    case = Case(type_name, byte, traits=traits)
    expected, found = case.expected(), case.run(TILE)
    np.testing.assert_allclose(found, expected, atol=4e-6 * np.abs(expected).max(), rtol=0)
    np.testing.assert_array_equal(found, case.run(DOT, 64))


@units
@pytest.mark.parametrize("slices", [4, 16])
@pytest.mark.parametrize("type_name", ["Q4_K", "Q2_K"])
def test_other_numbers_of_slices(type_name: str, slices: int, traits: Traits) -> None:
    """Sums that registers do not hold at once are made one after the other."""
    case = Case(type_name, weight_rows=100, traits=traits)
    np.testing.assert_array_equal(case.run(TILE, slices=slices), case.run(DOT, 64, slices=slices))


@units
@pytest.mark.parametrize("columns", [32, 160, 288])
def test_few_blocks(columns: int, traits: Traits) -> None:
    """Fewer blocks than slices, and slices of unequal length."""
    case = Case("Q4_0", columns=columns, traits=traits)
    np.testing.assert_array_equal(case.run(TILE), case.run(DOT, 64))


@units
def test_bias(traits: Traits) -> None:
    case = Case("Q5_0", traits=traits)
    np.testing.assert_array_equal(case.run(TILE, epilogue="store_bias"), case.run(DOT, 64) + case.bias)


@units
@pytest.mark.parametrize(("type_name", "activation", "form", "slices"), [
    ("Q4_K", "silu", "q8_32s", 8), ("Q6_K", "gelu", "q8_32s", 4), ("Q8_0", "silu", "f32", 16),
    ("Q2_K", "silu", "f32", 8),
])
def test_gated(type_name: str, activation: str, form: str, slices: int, traits: Traits) -> None:
    case = GatedCase(type_name, activation, form, traits)
    found = case.run(Share(64, 1, "matrix"), slices=slices)
    for tile, dot in zip(found, case.run(DOT, 64, slices=slices), strict=True):
        np.testing.assert_array_equal(tile, dot)
    samples.assert_stands_for(found, form, case.expected())


@units
@pytest.mark.parametrize("type_name", CODES)
def test_steps(type_name: str, traits: Traits) -> None:
    """Rows that do not fill the unit's tiles, in every format; nothing is written for the rows that are not there."""
    case = Case(type_name, traits=traits)
    whole = case.run(DOT)
    for rows in (8, 13, 16):
        np.testing.assert_array_equal(case.run(Share(rows, 1, "matrix")), whole[:rows])


@units
@pytest.mark.parametrize(("type_name", "slices"), [("Q4_K", 4), ("Q6_K", 8), ("Q2_K", 16)])
def test_every_number_of_rows(type_name: str, slices: int, traits: Traits) -> None:
    case = Case(type_name, weight_rows=100, traits=traits)
    whole = case.run(DOT, slices=slices)
    for rows in range(8, 17):
        np.testing.assert_array_equal(case.run(Share(rows, 1, "matrix"), slices=slices), whole[:rows])


@units
@pytest.mark.parametrize(("rows", "form"), [(8, "f32"), (11, "q8_32s"), (16, "f32")])
def test_gated_steps(rows: int, form: str, traits: Traits) -> None:
    case = GatedCase("Q4_K", "silu", form, traits)
    for tile, dot in zip(case.run(Share(rows, 1, "matrix")), case.run(Share(rows, 1)), strict=True):
        np.testing.assert_array_equal(tile, dot)


@units
@pytest.mark.parametrize("rows", [9, 16])
def test_best_of_32(rows: int, traits: Traits) -> None:
    """Also in a second pass of 16 rows."""
    case = Case("Q6_K", traits=traits)
    launched = 32 if rows == 16 else rows
    for tile, dot in zip(case.best(Share(rows, 1, "matrix"), launched), case.best(Share(rows, 1), launched),
                         strict=True):
        np.testing.assert_array_equal(tile, dot)


@units
@pytest.mark.parametrize("rows", [8, 15])
@pytest.mark.parametrize("case", [("Q4_K", 256, "neox", 128, "store_bias", "q8_0"),
                                  ("Q8_0", 80, "norm", 40, "store", "f16")], ids=lambda c: f"{c[0]}-d{c[1]}")
def test_injection(case: Parameters, rows: int, traits: Traits) -> None:
    """Heads of 80 elements: the last step has one row group."""
    c = Injection(*case)
    c.traits = traits
    for tile, dot in zip(c.run(rows, Share(rows, 1, "matrix"), ALL), c.run(rows, Share(rows, 1), ALL), strict=True):
        np.testing.assert_array_equal(tile, dot)


@units
@pytest.mark.parametrize("case", [("Q8_0", 320, 5, 16, "q8_32s"), ("Q4_K", 256, 1, 32, "f32")],
                         ids=lambda c: c[0])
def test_convolution(case: tuple[str, int, int, int, str], traits: Traits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight rows that lie apart, in one pass of 32 and in two."""
    monkeypatch.setattr(convolution, "TRAITS", traits)
    monkeypatch.setattr(convolution, "run_kernel", partial(run_emulated, traits))
    c = convolution.Case(*case)
    (tiles, tiles_dynamic), (dots, dots_dynamic) = c.run_first(10, "matrix"), c.run_first(10)
    for tile, dot in zip([*tiles, tiles_dynamic], [*dots, dots_dynamic], strict=True):
        np.testing.assert_array_equal(tile, dot)


def test_where_they_are_used() -> None:
    """From some row on, for weights that are codes, where the architecture has one that kernels know."""
    tile = Traits("cuda", "sm_89")
    assert share_of_matmul(tile, "q4_k", 256) == TILE
    assert share_of_matmul(tile, "q4_k", 64, matrices=2) == Share(64, 1, "matrix")
    assert share_of_matmul(tile, "f16", 256) == Share(16, 2)
    for code, arch in (("cuda", "sm_75"), ("vulkan", "gfx1151"), ("vulkan", "generic")):
        assert matrix_unit(Traits(code, arch)) is None
        assert share_of_matmul(Traits(code, arch), "q4_k", 256) == Share(16, 2)
        assert share_of_matmul(Traits(code, arch), "q4_k", 16) == Share(16, 1)


@pytest.mark.parametrize(("code", "arch", "first"), [("cuda", "sm_89", 8), ("rocm", "gfx1151", 12),
                                                     ("rocm", "gfx1201", 8)])
def test_steps_that_use_them(code: str, arch: str, first: int) -> None:
    traits = Traits(code, arch)
    assert [rows for rows in range(1, 17) if share_of_matmul(traits, "q4_k", rows).by == "matrix"] \
        == list(range(first, 17))
    assert share_of_matmul(traits, "f16", 16) == Share(16, 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_cuda_calls_the_instructions(arch: str) -> None:
    """32 columns at once where a block has one scale, 16 where its halves have their own."""
    require_toolchain("cuda-sm89")
    traits = Traits("cuda", arch, most_threads=1024)
    for name, instruction in (("q4_k", "m16n8k32"), ("q6_k", "m16n8k16")):
        source = kernel_source(arch, [matmul(traits, name, TILE, "store")])
        assert set(re.findall(r"multiply_(m16n8k\d+)\(", source)) == {instruction}
        assert source.count("multiply_m16") == 4 * 8 * (2 if name == "q6_k" else 1)  # row groups, tiles, parts
        ptx = nvrtc.compile_source(translation_unit([source]), arch).ptx.decode()
        assert set(re.findall(r"mma\.sync\.aligned\.(\w+)", ptx)) == {instruction}


@pytest.mark.parametrize(("arch", "words"), [("gfx1100", 4), ("gfx1151", 4), ("gfx1201", 2)])
def test_rocm_calls_the_instruction(arch: str, words: int) -> None:
    text = kernel_ir(arch, matmul(Traits("rocm", arch, most_threads=1024), "q4_k", TILE, "store"))
    calls = re.findall(r"call <8 x i32> @llvm\.amdgcn\.wmma\.i32\.16x16x16\.iu8\.v8i32\.v(\d)i32", text)
    assert calls == [str(words)] * (4 * 4 * 2)  # row groups, tiles, halves of a block
