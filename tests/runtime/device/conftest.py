"""The tiny artefact opened on every kind of GPU: Vulkan on whatever driver there is, CUDA and HIP on a fake."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device import hip, vulkan
from dflashc.runtime.device.gpu import GpuDevice
from dflashc.runtime.device.opening import open_device
from dflashc.runtime.device.vulkan.api import load_api
from tests.runtime.device import fake_cuda, fake_hip
from tests.runtime.device.fake_gpu import FakeGpu, module_code
from tests.runtime.device.shaders import SOURCES, require_vulkan, spirv
from tests.runtime.device.tiny import gpu_requirements, write_tiny
from tests.runtime.device.watched_vulkan import watch

KINDS = ("vulkan", "vulkan-discrete", "cuda", "rocm")


@dataclass
class Tiny:
    """The tiny artefact on a kind of GPU that is watched.

    Attributes
    ----------
    watch
        Has `names`, `fail_at`, `failed`, `live` and `negligible`; what it is depends on the kind.
    """

    kind: str
    artefact: Artefact
    watch: Any
    opened: list[GpuDevice] = field(default_factory=list)

    def open(self) -> GpuDevice:
        """Open a device, which the test need not close."""
        device = open_device(self.artefact)
        assert isinstance(device, GpuDevice)
        self.opened.append(device)
        return device


@pytest.fixture(params=KINDS)
def tiny(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiny]:
    made = _MAKERS[request.param.partition("-")[0]](request.param, tmp_path, monkeypatch)
    yield made
    for device in made.opened:
        device.close()


def _vulkan(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    require_vulkan()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    artefact = write_tiny(folder / "tiny", gpu_requirements("vulkan"), {symbol: spirv(symbol) for symbol in SOURCES})
    api, library = watch(load_api(), discrete=kind == "vulkan-discrete")
    monkeypatch.setattr(vulkan, "load_api", lambda: api)
    return Tiny(kind, artefact, library)


def _fake(level: str, negligible: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr("dflashc.runtime.device.gpu.STAGING_BYTES", 1 << 14)  # every byte of it is watched
    return FakeGpu(level, negligible=negligible)


def _cuda(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    gpu = _fake("sm_89", fake_cuda.NEGLIGIBLE, monkeypatch)
    for name, module in fake_cuda.fake_bindings(gpu).items():
        monkeypatch.setitem(sys.modules, name, module)
    return Tiny(kind, write_tiny(folder / "tiny", gpu_requirements("cuda", "sm_89"), module_code()), gpu)


def _rocm(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    gpu = _fake("gfx1151", fake_hip.NEGLIGIBLE, monkeypatch)
    monkeypatch.setattr(hip, "load_library", lambda: fake_hip.FakeHip(gpu))
    return Tiny(kind, write_tiny(folder / "tiny", gpu_requirements("rocm", "gfx1151"), module_code()), gpu)


_MAKERS: dict[str, Callable[[str, Path, pytest.MonkeyPatch], Tiny]] = {
    "vulkan": _vulkan, "cuda": _cuda, "rocm": _rocm}
