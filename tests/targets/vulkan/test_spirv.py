"""SPIR-V modules: exact floats, the features they need, and damage."""

from pathlib import Path

import pytest

from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.vulkan.spirv import Instruction, instructions, required_features, with_exact_floats
from dflashc.targets.vulkan.target import compile_kernels, shader_source
from dflashc.targets.vulkan.toolchain import tool
from tests.targets.gpu import small_kernels
from tests.targets.gpu.building import require_toolchain

FADD, FMUL, LESS, CONVERT, STORE, DECORATE, CAPABILITY = 129, 133, 184, 115, 62, 71, 17
NO_CONTRACTION, ROUNDING = 42, 39
FLOATS = "shaderSignedZeroInfNanPreserveFloat32"
FEATURES = {
    "scale": {FLOATS}, "block_sum": {FLOATS}, "dot_rows": {"VK_KHR_shader_integer_dot_product"},
    "halves": {FLOATS, "storageBuffer16BitAccess"},
    "wide": {"shaderFloat64", "shaderInt64"}, "small_integers": {"storageBuffer16BitAccess", "storageBuffer8BitAccess"},
    "control": set(), "floats": {FLOATS}, "exchange": set(), "names": set(),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, bytes]:
    require_toolchain("vulkan")
    kernels = compile_kernels(Traits("vulkan", "gfx1151"), small_kernels.REQUESTS)
    return {k.kernel.symbol: k.code for k in kernels}


def test_features_are_those_that_a_kernel_uses(compiled: dict[str, bytes]) -> None:
    """And each module has passed spirv-val, or there would be none."""
    assert {name: set(required_features(code)) for name, code in compiled.items()} == FEATURES


def test_no_float_arithmetic_may_be_contracted(compiled: dict[str, bytes]) -> None:
    for code in compiled.values():
        body = list(instructions(code))
        exact = {i.operands[0] for i in body if i.opcode == DECORATE and i.operands[1] == NO_CONTRACTION}
        assert {i.operands[1] for i in body if i.opcode in (FADD, FMUL, LESS)} <= exact


def test_stored_halves_are_rounded_to_even(compiled: dict[str, bytes]) -> None:
    """Of the two conversions in this kernel one is stored, and the other one Vulkan leaves to the driver."""
    body = list(instructions(compiled["halves"]))
    rounded = [i.operands for i in body if i.opcode == DECORATE and i.operands[1] == ROUNDING]
    assert [r[2] for r in rounded] == [0]
    stored = {i.operands[1] for i in body if i.opcode == STORE}
    assert rounded[0][0] in stored & {i.operands[1] for i in body if i.opcode == CONVERT}


def test_marking_twice_or_nothing_changes_nothing_else(tmp_path: Path) -> None:
    require_toolchain("vulkan")
    traits = Traits("vulkan", "generic")
    (tmp_path / "a.comp").write_text(shader_source(traits, small_kernels.scale(traits)))
    module, shader = str(tmp_path / "a.spv"), str(tmp_path / "a.comp")
    tool("glslangValidator").run("-V", "--target-env", "vulkan1.2", "-o", module, shader)
    plain = Path(module).read_bytes()
    before, after = list(instructions(plain)), list(instructions(with_exact_floats(plain)))
    added = [i for i in after if i not in before]
    assert [i for i in after if i in before] == before
    assert sorted(i.opcode for i in added) == [16, CAPABILITY, DECORATE]


def test_other_capabilities_are_refused(compiled: dict[str, bytes]) -> None:
    subgroups = Instruction(CAPABILITY, (61,))
    code = compiled["scale"]
    with pytest.raises(TargetError, match="capability 61"):
        required_features(code + b"".join(w.to_bytes(4, "little") for w in subgroups.words))


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"\0" * 40, lambda c: c[:20] + b"\0\0\0\0" + c[24:]])
def test_damaged_modules_are_refused(compiled: dict[str, bytes], damage) -> None:
    with pytest.raises(TargetError):
        required_features(damage(compiled["scale"]))
