"""Runs one kernel on the machine's Vulkan device, be it Mesa's driver for the CPU, and gives its buffers back.

Skips, with the reason, where kernels cannot be compiled or there is no device.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest

from dflashc.runtime.device import kernels, vulkan
from dflashc.runtime.device.driver import ALIGNMENT, Binding, Call, Place
from dflashc.runtime.device.vulkan.api import load_api
from dflashc.runtime.device.vulkan.driver import VulkanDriver
from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.builder import Kernel
from dflashc.targets.gpu.target import describe
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.vulkan import toolchain
from dflashc.targets.vulkan.spirv import required_features
from dflashc.targets.vulkan.target import shader_source

GENERIC = Traits("vulkan", "generic")

_FEATURES = ("shaderInt8", "shaderInt16", "shaderInt64", "shaderFloat16", "shaderFloat64", "storageBuffer8BitAccess",
             "storageBuffer16BitAccess", "VK_KHR_shader_integer_dot_product", "shaderSignedZeroInfNanPreserveFloat32")
_FOLDER = TemporaryDirectory(prefix="dflashc-kernels-")
atexit.register(_FOLDER.cleanup)


def run_kernel(kernel: Kernel, arguments: Sequence[np.ndarray | float], groups: int,
               traits: Traits = GENERIC) -> list[np.ndarray]:
    """The buffers, in order, after `groups` workgroups of the kernel.

    Parameters
    ----------
    arguments : sequence of arrays and numbers
        As the kernel declares them; arrays are not changed.
    """
    driver, table = _device()
    called = table.add(shader_source(traits, kernel), describe(kernel))
    arrays, bindings, scalars = [], [], b""
    for declared, value in zip(kernel.arguments, arguments, strict=True):
        if declared.is_scalar:
            scalars += (np.int32 if declared.kind == "i32" else np.float32)(value).tobytes()
            continue
        array = np.ascontiguousarray(value)
        block = driver.allocate(-(-max(array.nbytes, 1) // ALIGNMENT) * ALIGNMENT, Place.SHARED)
        block.mapped[: array.nbytes] = array.view(np.uint8).reshape(-1)
        arrays.append(array)
        bindings.append(Binding(block, 0, block.nbytes))
    recording = driver.record([Call(called, tuple(bindings), scalars, groups, True)])
    driver.submit(recording)
    driver.wait()
    driver.discard(recording)
    results = []
    for array, (block, _, _) in zip(arrays, bindings, strict=True):
        results.append(block.mapped[: array.nbytes].copy().view(array.dtype).reshape(array.shape))
        driver.release(block)
    return results


class _Table(kernels.KernelTable):
    """Kernels as they come, by the hash of their source."""

    def add(self, source: str, kernel: kernels.Kernel) -> kernels.Kernel:
        symbol = hashlib.sha256(source.encode()).hexdigest()
        path = Path(_FOLDER.name) / f"{symbol}.code"
        if not path.exists():
            code = toolchain.compile_shader(source, Path(_FOLDER.name), symbol)
            assert required_features(code) <= set(_FEATURES)
            path.write_bytes(code)
        return replace(kernel, symbol=symbol)

    def read(self, kernel: kernels.Kernel) -> bytes:
        return (Path(_FOLDER.name) / f"{kernel.symbol}.code").read_bytes()


@cache
def _device() -> tuple[VulkanDriver, _Table]:
    """The first Vulkan device, open until the process ends."""
    if lacking := toolchain.missing():
        pytest.skip(f"kernels for Vulkan need {'; '.join(lacking)}")
    try:
        found = vulkan.find_gpus()
    except TargetError as error:
        pytest.skip(str(error))
    if not found:
        pytest.skip("there is no Vulkan device")
    table = _Table("spirv", {}, Path())
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=_FOLDER.name):
        driver = VulkanDriver(load_api(), 0, table, [f for f in _FEATURES if f in found[0].features])
    atexit.register(driver.close)
    return driver, table
