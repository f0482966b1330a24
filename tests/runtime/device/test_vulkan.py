"""What only Vulkan has: features by name, a pipeline cache, memory types, the validation layer."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflashc.runtime.device import vulkan
from dflashc.runtime.device.driver import Limits, Place
from dflashc.runtime.device.opening import open_device, refusal
from dflashc.runtime.device.vulkan import adapters, find_gpus
from dflashc.runtime.device.vulkan import definitions as vk
from dflashc.runtime.device.vulkan.adapters import Adapter, GpuInfo
from dflashc.runtime.device.vulkan.api import load_api
from dflashc.runtime.device.vulkan.pipelines import cache_path, read_cache, write_cache
from dflashc.runtime.errors import ArtefactError, TargetError
from tests.runtime.device.conftest import Tiny
from tests.runtime.device.shaders import SOURCES, compile_glsl, require_vulkan, spirv
from tests.runtime.device.test_gpu import prepare, story, values
from tests.runtime.device.tiny import COUNT, expected, gpu_requirements, write_tiny

only_vulkan = pytest.mark.parametrize("tiny", ["vulkan", "vulkan-discrete"], indirect=True)


def test_what_a_device_lacks_is_listed_by_name() -> None:
    require_vulkan()
    (info, *_) = find_gpus()
    need = gpu_requirements("vulkan", features=("shaderInt8", "VK_KHR_shader_integer_dot_product", "shaderQuantum",
                                                "VK_NV_quantum"))
    assert refusal(vulkan, info, need).startswith("lacks shaderQuantum, VK_NV_quantum: ")
    assert refusal(vulkan, info, replace(need, features=need.features[:2])) == ""


def test_required_features_are_turned_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads bytes and multiplies them with an instruction of its own."""
    require_vulkan()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    features = ("storageBuffer8BitAccess", "shaderInt8", "VK_KHR_shader_integer_dot_product", "shaderIntegerDotProduct")
    source = SOURCES["copy"].replace("#version 450", """#version 450
        #extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
        #extension GL_EXT_shader_8bit_storage : require
        #extension GL_EXT_spirv_intrinsics : require
        spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450)
        int dot4(int a, int b, spirv_literal int form);""").replace("{ float y[]; }", "{ int8_t y[]; }").replace(
        "emitted[i] = y[i];", "emitted[i] = dot4(0x01020304, int(y[i]), 0);")
    code = {symbol: spirv(symbol) for symbol in SOURCES} | {"copy": compile_glsl(source)}
    tiny = Tiny("vulkan", write_tiny(tmp_path / "tiny", gpu_requirements("vulkan", features=features), code), None)
    device = tiny.open()
    memories, _ = prepare(device, tiny)
    device.upload(memories["y"], np.arange(-8, 8, dtype=np.int8))
    prepared = device.record(tiny.artefact.plan.programs["run.1"].launches[-1:], memories, 256)
    prepared.run()
    # the lowest byte of a sign-extended byte times 4, the others times 3, 2 and 1
    number = np.arange(-8, 8)
    assert np.array_equal(device.download(memories["emitted"], "float32", 16),
                          4 * number + np.where(number < 0, -6, 0))
    device.close()


@only_vulkan
def test_code_that_is_no_spirv(tiny: Tiny) -> None:
    path = tiny.artefact.directory / "kernels.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ArtefactError, match="the code of kernel scale is no SPIR-V"):
        prepare(tiny.open(), tiny)


@only_vulkan
def test_a_missing_loader(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("dflashc.runtime.device.vulkan.api.LIBRARY", "libnothing.so.1")
    load_api.cache_clear()
    with pytest.raises(TargetError, match=r"libnothing.so.1 was not found: install the Vulkan loader"):
        tiny.open()
    monkeypatch.setitem(sys.modules, "cffi", None)
    with pytest.raises(TargetError, match=r"pip install 'dflashc\[vulkan\]'"):
        tiny.open()
    monkeypatch.undo()
    load_api.cache_clear()


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_vulkan()
    nowhere = str(tmp_path / "none.json")
    monkeypatch.setenv("VK_ICD_FILENAMES", nowhere)
    monkeypatch.setenv("VK_DRIVER_FILES", nowhere)
    with pytest.raises(TargetError, match="vkCreateInstance failed: incompatible driver: install a driver"):
        find_gpus()


# The pipeline cache --------------------------------------------------------------------------------------------------


@only_vulkan
def test_pipelines_are_cached_per_driver(tiny: Tiny) -> None:
    story(tiny)
    (path,) = (Path(os.environ["XDG_CACHE_HOME"]) / "dflashc" / "pipelines").iterdir()
    stored = read_cache(path)
    assert stored[4:8] == (1).to_bytes(4, "little"), "a cache begins with its size and version 1"
    path.write_bytes(b"damaged" + path.read_bytes())
    story(tiny)
    assert read_cache(path) == stored, "a damaged cache is written anew"


def test_a_cache_that_is_damaged_or_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path(b"\x01\xff")
    assert path == tmp_path / "dflashc" / "pipelines" / "01ff.bin"
    assert read_cache(path) == b""
    write_cache(path, b"data")
    assert read_cache(path) == b"data"
    for damaged in (b"", b"x", path.read_bytes()[:-1], path.read_bytes() + b"x"):
        path.write_bytes(damaged)
        assert read_cache(path) == b""
    (tmp_path / "file").write_bytes(b"")
    write_cache(tmp_path / "file" / "below.bin", b"data")


# Memory types --------------------------------------------------------------------------------------------------------

LOCAL, VISIBLE, CACHED = vk.MEMORY_DEVICE_LOCAL, vk.MEMORY_HOST_VISIBLE | vk.MEMORY_HOST_COHERENT, vk.MEMORY_HOST_CACHED
LIMITS = Limits(1, (1, 1, 1), 1, 1, 1, 1, 1)


def adapter(kind: str, *types: tuple[int, int]) -> Adapter:
    heaps = (100, 1000)
    return Adapter(None, GpuInfo("x", kind, "", "", 0, LIMITS), 0, frozenset(), 0, 0, 0.0, types, heaps, b"")


def test_memory_types_of_a_discrete_and_an_integrated_device() -> None:
    special = 0x40  # VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD
    types = ((LOCAL | VISIBLE, 0), (LOCAL, 0), (VISIBLE, 1), (VISIBLE | CACHED, 1), (LOCAL | VISIBLE | special, 0))
    discrete, integrated = adapter("discrete", *types), adapter("integrated", *types)
    assert discrete.memory_choices(Place.DEVICE) == [1, 0], "never the host's memory, which would be slow"
    assert discrete.memory_choices(Place.SHARED)[0] == 3, "the host reads cached memory faster"
    assert integrated.memory_choices(Place.DEVICE) == [0, 2, 3], "all of it is the same memory"
    api = load_api()
    assert adapters.available_memory(api, discrete) == 100
    assert adapters.available_memory(api, integrated) == 1100


# The validation layer ------------------------------------------------------------------------------------------------

LAYER = "VK_LAYER_KHRONOS_validation"


def test_the_validation_layer_finds_nothing(tmp_path: Path) -> None:
    """All use of the API, and that whatever a launch reads was written before it."""
    require_vulkan()
    if not any(Path(folder, "VkLayer_khronos_validation.json").exists() for folder in (
            "/usr/share/vulkan/explicit_layer.d", "/etc/vulkan/explicit_layer.d")):
        pytest.skip("the validation layer is missing (Debian: vulkan-validationlayers)")
    tests = [f"{Path(__file__).with_name('test_gpu.py')}::{name}[{kind}]" for kind in ("vulkan", "vulkan-discrete")
             for name in ("test_the_launches_of_a_run_are_timed_one_by_one",
                          "test_a_recording_can_be_run_often_and_beside_others")]
    environment = os.environ | {
        "VK_INSTANCE_LAYERS": LAYER, "VK_LOADER_DEBUG": "layer",
        "VK_LAYER_ENABLES": "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *tests], env=environment,
                          capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f'Insert instance layer "{LAYER}"' in said
    assert "Validation Error" not in said, said


def test_a_software_device_is_named(tmp_path: Path) -> None:
    require_vulkan()
    artefact = write_tiny(tmp_path / "tiny", gpu_requirements("vulkan"), {symbol: spirv(symbol) for symbol in SOURCES})
    software = [i for i, info in enumerate(find_gpus()) if info.kind == "software"]
    if not software:
        pytest.skip("no software device")
    device = open_device(artefact, gpu=str(software[0]))
    assert "is no GPU" in device.notes[0]
    device.close()


def test_results_are_those_of_numpy_on_every_device(tmp_path: Path) -> None:
    require_vulkan()
    artefact = write_tiny(tmp_path / "tiny", gpu_requirements("vulkan"), {symbol: spirv(symbol) for symbol in SOURCES})
    for index in range(len(find_gpus())):
        device = open_device(artefact, gpu=str(index))
        memories, replay = prepare(device, Tiny("vulkan", artefact, None))  # type: ignore[arg-type]
        device.upload(memories["x"], values())
        replay.run()
        assert np.array_equal(device.download(memories["y"], "float32", COUNT), expected(values()))
        device.close()
