"""What only CUDA has: architectures, PTX, and machines without package, driver or GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device import cuda
from dflashc.runtime.device.gpu import GpuDevice
from dflashc.runtime.device.opening import open_device
from dflashc.runtime.errors import ArtefactError, TargetError
from tests.runtime.device.conftest import Tiny
from tests.runtime.device.fake_cuda import FakeCuda, fake_bindings
from tests.runtime.device.fake_gpu import FakeGpu, module_code
from tests.runtime.device.test_gpu import prepare, result, values
from tests.runtime.device.tiny import expected, gpu_requirements, write_tiny


@pytest.fixture
def artefact(tmp_path: Path) -> Artefact:
    return write_tiny(tmp_path, gpu_requirements("cuda", "sm_89"), module_code())


def install(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu | None) -> None:
    for name, module in fake_bindings(gpu).items():
        monkeypatch.setitem(sys.modules, name, module)


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu("sm_120"))
    (info,) = cuda.find_gpus()
    assert (info.name, info.kind, info.driver, info.level) == ("Fake GPU", "discrete", "CUDA 13.2", "sm_120")
    assert info.limits.threads == (1024, 1024, 64)


@pytest.mark.parametrize(("built", "found", "allow_ptx", "message"), [
    ("sm_89", "sm_89", False, ""),
    ("sm_86", "sm_89", False, ""),
    ("sm_89", "sm_86", False, "is sm_86, the artefact needs sm_89 or later: build for cuda-sm86"),
    ("sm_89", "sm_86", True, "is sm_86, the artefact needs sm_89 or later: build for cuda-sm86"),
    ("sm_89", "sm_90", False, "is sm_90, the artefact's code is for sm_89: build for cuda-sm90, or give --allow-ptx"),
    ("sm_89", "sm_120", True, ""),
])
def test_architectures(monkeypatch: pytest.MonkeyPatch, built: str, found: str, allow_ptx: bool, message: str) -> None:
    install(monkeypatch, FakeGpu(found))
    (info,) = cuda.find_gpus()
    assert cuda.refusal(info, gpu_requirements("cuda", built), allow_ptx) == message


def test_an_architecture_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu())
    (info,) = cuda.find_gpus()
    with pytest.raises(ArtefactError, match="'gfx1151' is no CUDA architecture"):
        cuda.refusal(info, gpu_requirements("cuda", "gfx1151"), False)


def test_ptx_is_used_where_it_is_allowed_and_that_is_said(monkeypatch: pytest.MonkeyPatch, artefact: Artefact) -> None:
    gpu = FakeGpu("sm_120")
    install(monkeypatch, gpu)
    with pytest.raises(TargetError, match="Fake GPU: is sm_120, the artefact's code is for sm_89"):
        open_device(artefact)
    loaded = []
    monkeypatch.setattr(gpu, "load", lambda code, load=gpu.load: (loaded.append(code), load(code.rstrip(b"\0")))[1])
    device = open_device(artefact, allow_ptx=True)
    assert isinstance(device, GpuDevice)
    assert device.notes == ["the artefact's code is for sm_89, Fake GPU is sm_120: its driver compiles PTX instead"]
    assert loaded == [module_code() + b"\0"], "PTX ends with a zero byte"
    memories, replay = prepare(device, Tiny("cuda", artefact, gpu))
    device.upload(memories["x"], values())
    replay.run()
    assert np.array_equal(result(device, memories), expected(values()))
    device.close()
    assert not gpu.live


def test_no_package(monkeypatch: pytest.MonkeyPatch, artefact: Artefact) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(TargetError, match=r"need the Python package cuda-bindings: pip install 'dflashc\[cuda\]'"):
        open_device(artefact)


def test_no_driver(monkeypatch: pytest.MonkeyPatch, artefact: Artefact) -> None:
    install(monkeypatch, None)
    for _ in range(2):
        with pytest.raises(TargetError, match=r"no CUDA driver was found \(libcuda.so.1\): install"):
            open_device(artefact)


def test_a_driver_without_gpu(monkeypatch: pytest.MonkeyPatch, artefact: Artefact) -> None:
    gpu = FakeGpu()
    install(monkeypatch, gpu)
    monkeypatch.setattr(FakeGpu, "fails", lambda self, name: 999)
    with pytest.raises(TargetError, match="CUDA: cuInit failed: CUDA_ERROR_UNKNOWN"):
        open_device(artefact)


def test_the_package_has_what_is_called() -> None:
    """Names and numbers that the fake takes for granted."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings, of the extra cuda")
    called = [name for name in FakeCuda(FakeGpu()).functions() if name.startswith("cu")]
    assert len(called) > 30
    assert [name for name in called if not callable(getattr(driver, name, None))] == []
    numbers = {driver.CUresult.CUDA_ERROR_NOT_READY: cuda._NOT_READY,
               driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY: cuda._OUT_OF_MEMORY,
               driver.CUstream_flags.CU_STREAM_NON_BLOCKING: cuda._NON_BLOCKING}
    assert all(int(theirs) == ours for theirs, ours in numbers.items())
    assert cuda._HOST_DEVICE_MAPPED == driver.CU_MEMHOSTALLOC_DEVICEMAP
    for name in cuda.ATTRIBUTES:
        assert hasattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
