"""What all GPU targets write and refuse alike."""

import json
from pathlib import Path

import numpy as np
import pytest

from dflashc.runtime.artefact import GPU_CODE, GPU_KERNELS, GPU_PTX
from dflashc.runtime.device.kernels import CODES
from dflashc.runtime.errors import BuildError, TargetError
from dflashc.targets.gpu.builder import Kernel, KernelBuilder, f32, store
from dflashc.targets.gpu.target import GpuTarget, build_kernel
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.registry import find_target, target_names
from dflashc.targets.requests import KernelRequest
from tests.targets.gpu import small_kernels
from tests.targets.gpu.building import require_toolchain

TARGETS = ["vulkan", "vulkan-gfx1151", "cuda-sm89", "rocm-gfx1151", "rocm-gfx1100"]


@pytest.mark.parametrize("name", TARGETS)
def test_kernels_are_listed_as_launches_call_them(name: str, tmp_path: Path) -> None:
    require_toolchain(name)
    target, done = find_target(name), []
    need = target.compile([*small_kernels.REQUESTS, small_kernels.REQUESTS[0]], tmp_path, done.append)
    listing = json.loads((tmp_path / GPU_KERNELS).read_text())
    assert (listing["version"], listing["code"]) == (1, CODES[need.machine])
    assert sum(done) == len(listing["kernels"]) == len(small_kernels.ALL)
    size = (tmp_path / GPU_CODE).stat().st_size
    for kernel in listing["kernels"].values():
        assert kernel["threads"] == [small_kernels.THREADS, 1, 1]
        assert kernel["offset"] % 4 == 0
        assert 0 < kernel["bytes"] <= size - kernel["offset"]
    assert listing["kernels"]["scale"]["operands"] == ["buffer", "i32", "buffer", "f32"]
    assert listing["kernels"]["block_sum"]["shared"] == 4 * small_kernels.THREADS
    assert ("VK_KHR_shader_integer_dot_product" in need.features) == (name == "vulkan-gfx1151")
    assert (tmp_path / GPU_PTX).exists() == (need.machine == "cuda")


def _greedy(traits: Traits, threads: int, floats: int, scalars: int) -> Kernel:
    k = KernelBuilder("greedy", traits)
    with k.build([("x", "float32"), *((f"s{i}", "i32") for i in range(scalars))]) as (x, *_), k.workgroups(threads):
        if floats:
            k.shared(floats, "float32")
        store(x, 0, f32(1))
    return k.kernel


@pytest.mark.parametrize(("sizes", "what"), [((512, 0, 0), "512 threads"), ((64, 8193, 0), "32772 bytes of workgroup"),
                                             ((64, 0, 33), "132 bytes of scalars")])
def test_kernels_above_a_limit_are_refused_before_they_are_compiled(sizes: tuple[int, int, int], what: str) -> None:
    with pytest.raises(TargetError, match=rf"{what}.*vulkan generic has"):
        build_kernel(Traits("vulkan", "generic"), KernelRequest("greedy", _greedy, sizes))


def test_a_launch_that_passes_other_operands_is_an_error() -> None:
    request = KernelRequest("scale", small_kernels.scale, (), ("buffer", "i64", "buffer", "i64"))
    with pytest.raises(AssertionError, match="its launch passes"):
        build_kernel(Traits("vulkan", "generic"), request)


def test_weights_have_groups_of_16_rows_and_read_one_form() -> None:
    target = find_target("vulkan")
    assert isinstance(target, GpuTarget)
    weight, note = target.describe_weight("w", "Q4_K", (33, 512))
    assert (weight.form, note) == ("q8_32s", "")
    packed = target.pack_rows("Q4_K", np.zeros((33, 288), np.uint8), 512)
    assert packed.nbytes == weight.bytes
    assert target.describe_weight("w", "F16", (32, 64))[0].form == "f32"
    with pytest.raises(BuildError, match=r"w \(Q4_K\) has 96 columns"):
        target.describe_weight("w", "Q4_K", (32, 96))


def test_unknown_targets_are_refused_with_the_known_ones() -> None:
    for name in ("cuda-sm70", "rocm-gfx906", "vulkan-gfx1100", "metal"):
        with pytest.raises(TargetError, match=f"unknown target '{name}'; known: "):
            find_target(name)
    assert set(TARGETS) <= set(target_names())
