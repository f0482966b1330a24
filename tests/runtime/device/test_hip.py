"""What only HIP has: architectures, and machines without ROCm, with an old one, or without a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device import hip
from dflashc.runtime.device.opening import open_device
from dflashc.runtime.errors import TargetError
from tests.runtime.device.fake_gpu import FakeGpu, module_code
from tests.runtime.device.fake_hip import FakeHip
from tests.runtime.device.tiny import gpu_requirements, write_tiny


@pytest.fixture
def artefact(tmp_path: Path) -> Artefact:
    return write_tiny(tmp_path, gpu_requirements("rocm", "gfx1151"), module_code())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeHip:
    fake = FakeHip(FakeGpu("gfx1100"))
    monkeypatch.setattr(hip, "load_library", lambda: fake)
    return fake


def test_a_gpu_is_described(library: FakeHip) -> None:
    (info,) = hip.find_gpus()
    assert (info.name, info.kind, info.driver, info.level, info.unfit) == (
        "gfx of a name", "integrated", "HIP 7.2", "gfx1100", "")


def test_buffers_end_where_kernels_cannot_see(library: FakeHip) -> None:
    """4 GiB, or all of the memory."""
    for memory, most in ((3 << 30, 3 << 30), (96 << 30, 4 << 30)):
        library._gpu.total = memory
        (info,) = hip.find_gpus()
        assert (info.memory, info.limits.binding, info.limits.allocation) == (memory, most, memory)


def test_code_for_another_architecture_is_never_used(library: FakeHip, artefact: Artefact) -> None:
    with pytest.raises(TargetError, match="is gfx1100, the artefact's code is for gfx1151: build for rocm-gfx1100"):
        open_device(artefact)


def test_a_runtime_stands_for_those_before_it(library: FakeHip, tmp_path: Path) -> None:
    (info,) = hip.find_gpus()
    assert {"HIP 7.2", "HIP 7.1", "HIP 6.4"} <= info.features
    artefact = write_tiny(tmp_path, gpu_requirements("rocm", "gfx1100", ("HIP 7.3",)), module_code())
    with pytest.raises(TargetError, match=r"lacks HIP 7\.3: update its driver"):
        open_device(artefact)


def test_no_runtime(monkeypatch: pytest.MonkeyPatch, artefact: Artefact) -> None:
    monkeypatch.setattr(hip, "LIBRARIES", ("libnothing.so",))
    with pytest.raises(TargetError, match=r"libamdhip64\.so was not found: install ROCm"):
        open_device(artefact)


def test_an_old_runtime(monkeypatch: pytest.MonkeyPatch, artefact: Artefact) -> None:
    monkeypatch.setattr(hip, "load_library", lambda: ctypes.CDLL(None))
    with pytest.raises(TargetError, match="the HIP runtime lacks hipInit: install ROCm 6 or later"):
        open_device(artefact)


def test_no_gpu(library: FakeHip, artefact: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGpu, "fails", lambda self, name: 100 if name == "hipGetDeviceCount" else 0)
    assert hip.find_gpus() == []
    with pytest.raises(TargetError, match="the driver shows no GPU"):
        open_device(artefact)


def test_a_gpu_that_does_not_tell_its_architecture(library: FakeHip, artefact: Artefact) -> None:
    library._gpu.level = "unknown"
    with pytest.raises(TargetError, match="does not tell its architecture"):
        open_device(artefact)
