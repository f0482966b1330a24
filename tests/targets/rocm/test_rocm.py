"""Small kernels for AMD GPUs: compiled and inspected, since no GPU is needed for that."""

import re
from pathlib import Path

import pytest

from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.rocm import toolchain
from dflashc.targets.rocm.code_object import read_code_object
from dflashc.targets.rocm.ir import kernel_ir
from tests.targets.gpu import small_kernels
from tests.targets.gpu.building import require_toolchain


def compile_small(arch: str) -> bytes:
    require_toolchain(f"rocm-{arch}")
    traits = Traits("rocm", arch)
    return toolchain.compile_modules(arch, [kernel_ir(arch, b(traits)) for b in small_kernels.ALL])


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_code_objects_are_what_launches_expect(arch: str) -> None:
    found = read_code_object(compile_small(arch))
    assert (found.version, found.target) == (5, arch)
    assert set(found.kernels) == {b.__name__ for b in small_kernels.ALL}
    for kernel in found.kernels.values():
        assert (kernel.wavefront, kernel.most_threads) == (32, small_kernels.THREADS)
        assert (kernel.spills, kernel.private_bytes) == (0, 0)
    scale = found.kernels["scale"]
    assert scale.arguments == (("global_buffer", 0, 8), ("global_buffer", 8, 8), ("by_value", 16, 4),
                               ("by_value", 20, 4))
    assert scale.kernarg_bytes == 24
    assert found.kernels["block_sum"].shared_bytes == 4 * small_kernels.THREADS


def ir(builder) -> str:
    return kernel_ir("gfx1151", builder(Traits("rocm", "gfx1151")))


def test_every_barrier_orders_memory() -> None:
    fenced = r"""  fence syncscope\("workgroup"\) release
  tail call void @llvm\.amdgcn\.s\.barrier\(\)
  fence syncscope\("workgroup"\) acquire
"""
    text = ir(small_kernels.block_sum)
    assert len(re.findall(fenced, text)) == len(re.findall(r"call void @llvm\.amdgcn\.s\.barrier", text)) == 7


def test_floats_and_dot_products_are_what_the_source_says() -> None:
    text = ir(small_kernels.floats)
    assert len(re.findall(r"call float @llvm\.fma\.f32", text)) == 1
    assert "fmuladd" not in text
    assert " contract " not in text
    assert "fcmp uno" in text  # x != x
    assert len(re.findall(r"call i32 @llvm\.amdgcn\.sudot4", ir(small_kernels.dot_rows))) == 4


def test_buffers_are_indexed_by_32_bits() -> None:
    """So that loads add the offset themselves: a scalar base and one register."""
    for builder in (small_kernels.scale, small_kernels.dot_rows):
        text = ir(builder)
        assert len(re.findall(r"zext i32 %offset\.\d+ to i64", text)) > 0
        assert not re.findall(r"getelementptr inbounds (?:nuw )?(?:i32|float), ptr addrspace\(1\)", text)


def test_missing_tools_are_named_with_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    llvm, lld = toolchain.missing()
    assert "pip install 'dflashc[rocm]'" in llvm
    assert "apt install lld" in lld
    with pytest.raises(TargetError, match=r"ld\.lld"):
        toolchain._link(b"")


def test_refusals_are_one_line() -> None:
    require_toolchain("rocm-gfx1151")
    for text, tool in (("nonsense", "LLVM refused"), (ir(small_kernels.scale).replace("ret void", ""), "LLVM refused")):
        with pytest.raises(TargetError, match=tool) as error:
            toolchain.compile_modules("gfx1151", [text])
        assert "\n" not in str(error.value)
    for damaged in (b"", b"\x7fELF" + b"\0" * 100, compile_small("gfx1151")[:2000]):
        with pytest.raises(TargetError):
            read_code_object(damaged)
