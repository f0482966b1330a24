"""What has no GLSL is refused by name, in one line; what threads share is declared so."""

from collections.abc import Callable

import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.builder import Expr, Kernel, KernelBuilder, cast, f32, i32, load, store
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.vulkan.glsl_types import float_literal, integer_literal
from dflashc.targets.vulkan.target import shader_source
from tests.targets.gpu import small_kernels

TRAITS = Traits("vulkan", "generic")


def kernel_of(body: Callable[[Expr, Expr], None]) -> Kernel:
    k = KernelBuilder("case", TRAITS)
    with k.build([("x", "float32"), ("n", "i32")]) as (x, n), k.workgroups(64):
        body(x, n)
    return k.kernel


REFUSED: dict[str, tuple[Callable[[Expr, Expr], None], str]] = {
    "function": (lambda x, n: store(x, 0, tirx.tan(load(x, 0))), "tirx.tan"),
    "half function": (lambda x, n: store(x, 0, cast("float32", tirx.exp(cast("float16", load(x, 0))))),
                      "exp of float16"),
    "extern": (lambda x, n: store(x, 0, tirx.call_pure_extern("float32", "sinhf", load(x, 0))), "sinhf"),
    "unaligned vector": (lambda x, n: store(x, 0, tirx.Shuffle(
        [tirx.BufferLoad(x, [tirx.Ramp(n, i32(1), 4)])], [i32(0)])), "a multiple of 4"),
    "wide vector": (lambda x, n: store(x, 0, tirx.Shuffle(
        [tirx.BufferLoad(x, [tirx.Ramp(n * 8, i32(1), 8)])], [i32(0)])), "float32x8"),
    "parallel loop": (lambda x, n: _loop(x, n), "kind 1"),
}


def _loop(x: Expr, n: Expr) -> None:
    with T.parallel(i32(0), n) as i:
        store(x, i, f32(0))


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_found(case: str) -> None:
    body, named = REFUSED[case]
    with pytest.raises(TargetError, match=named) as error:
        shader_source(TRAITS, kernel_of(body))
    assert "\n" not in str(error.value)


def test_buffers_that_threads_exchange_values_through_are_coherent() -> None:
    lines = shader_source(TRAITS, small_kernels.exchange(TRAITS)).splitlines()
    x, y = (line for line in lines if line.startswith("layout(std430"))
    assert "coherent" in y
    assert "coherent" not in x


def test_only_the_packed_dot_uses_the_instruction() -> None:
    sources = {arch: shader_source(t, small_kernels.dot_rows(t))
               for arch in ("generic", "gfx1151") for t in [Traits("vulkan", arch)]}
    assert "spirv_instruction" in sources["gfx1151"]
    assert "spirv_instruction" not in sources["generic"]


def test_literals_are_exact() -> None:
    assert integer_literal(-(1 << 31), "int32") == "int(0x80000000u)"
    assert integer_literal(-1, "int64") == "int64_t(0xfffffffffffffffful)"
    assert float_literal(0.5, "float32") == "0.5"
    assert float_literal(0.1, "float32") == "uintBitsToFloat(0x3dcccccdu)"
    assert float_literal(float("-inf"), "float16") == "float16_t(uintBitsToFloat(0xff800000u))"
    assert float_literal(0.1, "float64") == "0.1lf"
    assert float_literal(1e-300, "float64") == "packDouble2x32(uvec2(0xc2f8f359u, 0x1a56e1fu))"
