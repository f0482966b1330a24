"""Which device an artefact gets, and what is said when it gets none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflashc.runtime.device.driver import GpuInfo, Limits
from dflashc.runtime.device.fitting import check_fits, check_kernels
from dflashc.runtime.device.kernels import load_kernels
from dflashc.runtime.device.opening import choose_gpu, open_device
from dflashc.runtime.errors import RequestError, TargetError
from tests.runtime.device.tiny import KERNELS, gpu_requirements, write_tiny

LIMITS = Limits(groups=100, threads=(64, 64, 64), threads_in_all=64, shared=0, buffers=2, binding=1 << 20,
                allocation=1 << 20)


def info(name: str, kind: str = "discrete", limits: Limits = LIMITS) -> GpuInfo:
    return GpuInfo(name, kind, "driver 1", "", 1 << 30, limits)


GPUS = [info("llvmpipe", "software"), info("Radeon 8060S", "integrated"), info("GeForce A"), info("GeForce B")]


def fits(_: GpuInfo) -> str:
    return ""


@pytest.mark.parametrize(("wanted", "index"), [(None, 2), ("0", 0), ("3", 3), ("radeon", 1), ("force b", 3)])
def test_the_choice(wanted: str | None, index: int) -> None:
    assert choose_gpu(GPUS, wanted, fits) == index


def test_by_itself_the_best_that_fits_is_taken() -> None:
    assert choose_gpu(GPUS, None, lambda gpu: "no" if gpu.kind == "discrete" else "") == 1
    assert choose_gpu(GPUS[:1], None, fits) == 0


@pytest.mark.parametrize(("wanted", "message"), [
    ("4", "--device 4 names no GPUs, expected one of: 0 llvmpipe; 1 Radeon 8060S; 2 GeForce A; 3 GeForce B"),
    ("geforce", "--device geforce names 2 GPUs"),
    ("", "names 4 GPUs"),
    ("-1", "--device -1 names no GPUs"),
])
def test_a_choice_that_is_none(wanted: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        choose_gpu(GPUS, wanted, fits)


def test_every_refusal_is_named() -> None:
    with pytest.raises(TargetError, match=r"^GeForce A: too old; GeForce B: too old$"):
        choose_gpu(GPUS[2:], None, lambda gpu: "too old")
    with pytest.raises(TargetError, match=r"^llvmpipe: too slow$"):
        choose_gpu(GPUS, "0", lambda gpu: "too slow")
    with pytest.raises(TargetError, match="no GPU"):
        choose_gpu([], None, fits)


def test_options_of_the_other_kind_of_device(tmp_path: Path) -> None:
    vulkan = write_tiny(tmp_path, gpu_requirements("vulkan"), dict.fromkeys(KERNELS, b""))
    cpu = replace(vulkan, manifest=replace(vulkan.manifest, requirements=gpu_requirements("x86_64")))
    with pytest.raises(RequestError, match="runs on the CPU: --device and --allow-ptx are for GPUs"):
        open_device(cpu, gpu="0")
    with pytest.raises(RequestError, match="--threads is for CPUs"):
        open_device(vulkan, threads=2)
    with pytest.raises(RequestError, match="--allow-ptx is for CUDA"):
        open_device(vulkan, allow_ptx=True)


@pytest.mark.parametrize(("change", "message"), [
    ({"groups": 15}, "launch 'scale' needs 16 workgroups, GPU has 15"),
    ({"threads": (63, 64, 64)}, "kernel scale needs a workgroup's threads along x of 64, GPU has 63"),
    ({"threads_in_all": 63}, "kernel scale needs threads in a workgroup of 64, GPU has 63"),
    ({"buffers": 1}, "kernel scale needs a number of buffers of 2, GPU has 1"),
])
def test_kernels_beyond_the_limits(tmp_path: Path, change: dict[str, object], message: str) -> None:
    artefact = write_tiny(tmp_path, gpu_requirements("vulkan"), dict.fromkeys(KERNELS, b""))
    table = load_kernels(artefact)
    check_kernels(artefact.plan, table, info("GPU"))
    with pytest.raises(TargetError, match=message):
        check_kernels(artefact.plan, table, info("GPU", limits=replace(LIMITS, **change)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "message"), [
    ({"binding": 65_535}, "buffer cache has 65,536 bytes at a context of 1,024 tokens, GPU takes 65,535: use a sm"),
    ({"allocation": 65_535}, "buffer cache has 65,536 bytes"),
])
def test_sizes_beyond_the_limits(tmp_path: Path, change: dict[str, int], message: str) -> None:
    artefact = write_tiny(tmp_path, gpu_requirements("vulkan"), dict.fromkeys(KERNELS, b""))
    gpu = info("GPU", limits=replace(LIMITS, **change))
    with pytest.raises(TargetError, match=message):
        check_fits(artefact, 1024, gpu, 1 << 30, False)
    check_fits(artefact, 512, gpu, 1 << 30, False)


def test_weights_beyond_the_limits(tmp_path: Path) -> None:
    artefact = write_tiny(tmp_path, gpu_requirements("vulkan"), dict.fromkeys(KERNELS, b""))
    artefact = replace(artefact, plan=replace(artefact.plan, buffers={}))
    with pytest.raises(TargetError, match="weight a has 4,000 bytes, kernels of GPU see 4,031"):
        check_fits(artefact, 256, info("GPU", limits=replace(LIMITS, binding=4_031)), 1 << 30, False)
    with pytest.raises(TargetError, match=r"a block of weights has 4,\d\d\d bytes, GPU allocates 4,032 at once"):
        check_fits(artefact, 256, info("GPU", limits=replace(LIMITS, allocation=4_032)), 1 << 30, False)
    need = 4_000 + 2 * 192
    check_fits(artefact, 256, info("GPU"), need, False)
    with pytest.raises(TargetError, match="free: use a smaller --ctx"):
        check_fits(artefact, 256, info("GPU"), need - 1, False)
    check_fits(artefact, 256, info("GPU"), 0, True)
