"""Small kernels for NVIDIA GPUs: compiled and inspected, since no GPU is needed for that."""

import re

import pytest

from dflashc.runtime.errors import TargetError
from dflashc.targets.cuda import nvrtc
from dflashc.targets.cuda.cubin import read_cubin
from dflashc.targets.cuda.source import kernel_source, translation_unit
from dflashc.targets.gpu.traits import Traits
from tests.targets.gpu import small_kernels
from tests.targets.gpu.building import require_toolchain


def compile_small(arch: str) -> nvrtc.Compiled:
    require_toolchain("cuda-sm89")
    traits = Traits("cuda", arch)
    return nvrtc.compile_source(translation_unit([kernel_source(arch, [b(traits) for b in small_kernels.ALL])]), arch)


@pytest.mark.parametrize("arch", ["sm_75", "sm_89", "sm_120"])
def test_kernels_stay_in_registers(arch: str) -> None:
    records = read_cubin(compile_small(arch).cubin)
    assert set(records) == {b.__name__ for b in small_kernels.ALL}
    assert all(0 < r.registers <= 64 for r in records.values())
    assert [r.stack for r in records.values()] == [0] * len(records)
    assert records["block_sum"].shared_bytes >= 4 * small_kernels.THREADS


def test_only_what_is_written_as_fma_is_fused() -> None:
    ptx = compile_small("sm_89").ptx.decode()
    assert len(re.findall(r"\bfma\.rn\.f32", ptx)) == 1
    assert len(re.findall(r"\bdp4a\.s32\.s32", ptx)) == 4
    assert "fma.rn.f64" not in ptx


@pytest.mark.parametrize(("name", "operands"), [("multiply_m16n8k32", 6), ("multiply_m16n8k16", 3)])
def test_matrix_units_get_their_operands_in_order(name: str, operands: int) -> None:
    """Read off the PTX: the registers of D, A and B are those of their addresses, and C is one word four times."""
    require_toolchain("cuda-sm89")
    words = ", ".join(f"p[{i}]" for i in range(operands + 1))
    source = f"""extern "C" __global__ void f(const volatile int* p, volatile int* q) {{
      int d[4]; {name}(d, {words}); for (int i = 0; i < 4; ++i) q[i] = d[i]; }}"""
    ptx = nvrtc.compile_source(translation_unit([source]), "sm_89").ptx.decode()
    found = re.findall(r"ld\.volatile\.global\S* \t?(%r\d+), \[%rd\d+\+?(\d*)\]", ptx)
    loads = {register: int(offset or 0) for register, offset in found}
    found = re.findall(r"st\.volatile\.global\S* \t?\[%rd\d+\+?(\d*)\], (%r\d+)", ptx)
    stores = {register: int(offset or 0) for offset, register in found}
    (called,) = re.findall(r"mma\.sync\.\S+ (.*);", ptx)
    registers = re.findall(r"%r\d+", called)
    assert [stores[r] for r in registers[:4]] == [0, 4, 8, 12]
    assert [loads[r] for r in registers[4:]] == [*range(0, 4 * operands, 4), *[4 * operands] * 4]


def test_kernels_that_spilled_may_have_more_registers() -> None:
    source = kernel_source("sm_89", [small_kernels.scale(Traits("cuda", "sm_89"))])
    assert "__launch_bounds__(64, 8) scale(" in translation_unit([source])
    assert "__launch_bounds__(64, 1) scale(" in translation_unit([source], {"scale"})


def test_constants_are_exact() -> None:
    source = kernel_source("sm_89", [small_kernels.wide(Traits("cuda", "sm_89"))])
    assert "__longlong_as_double((int64_t)4599676419421066581)" in source.replace("  ", " ")


def test_a_refused_source_is_one_line() -> None:
    require_toolchain("cuda-sm89")
    with pytest.raises(TargetError, match=r"NVRTC refused the kernels for sm_89: .*error.*undefined") as error:
        nvrtc.compile_source("__global__ void f() { x = 1; }", "sm_89")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [10, 1000])
def test_damaged_cubins_are_refused(cut: int) -> None:
    with pytest.raises(TargetError):
        read_cubin(compile_small("sm_89").cubin[:cut])
