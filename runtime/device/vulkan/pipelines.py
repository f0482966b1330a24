"""Pipelines of an artefact's kernels, made when a recording first needs them, with the driver's cache on disk.

A kernel has its buffers in set 0 from binding 0 on and its scalars as push constants; its function is `main`.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dflashc.runtime.device.kernels import Kernel, KernelTable
from dflashc.runtime.device.vulkan import definitions as vk
from dflashc.runtime.device.vulkan.api import Api
from dflashc.runtime.errors import ArtefactError

_SPIRV_MAGIC = (0x07230203).to_bytes(4, "little")
_MOST_CACHE_BYTES = 256 << 20
_DIGEST_BYTES = 32


class Pipeline(NamedTuple):
    """A kernel ready to run: handles of the pipeline, its layout, and the layout of its descriptor set."""

    pipeline: int
    layout: int
    set_layout: int


class Pipelines:
    """Makes pipelines on a device, each once.

    Parameters
    ----------
    identity : bytes
        Of driver and device: a driver's cache is of no use to another.
    """

    def __init__(self, api: Api, device: Any, table: KernelTable, identity: bytes) -> None:
        self._api = api
        self._device = device
        self._table = table
        self._path = cache_path(identity)
        self._made: dict[str, Pipeline] = {}
        self._set_layouts: dict[int, int] = {}
        self._layouts: dict[tuple[int, int], int] = {}
        stored = read_cache(self._path)
        data = api.ffi.from_buffer(stored) if stored else api.ffi.NULL
        info = api.struct("VkPipelineCacheCreateInfo", initialDataSize=len(stored), pInitialData=data)
        self._cache = api.create("vkCreatePipelineCache", "VkPipelineCache", device, info)

    def get(self, kernel: Kernel) -> Pipeline:
        """The pipeline of a kernel. Raises `ArtefactError` for code that is no SPIR-V."""
        if kernel.symbol not in self._made:
            self._made[kernel.symbol] = self._make(kernel)
        return self._made[kernel.symbol]

    def _make(self, kernel: Kernel) -> Pipeline:
        code = self._table.read(kernel)
        if len(code) % 4 or not code.startswith(_SPIRV_MAGIC):
            raise ArtefactError(f"the code of kernel {kernel.symbol} is no SPIR-V: build again")
        api = self._api
        layout = self._layout(kernel)
        words = api.ffi.new("uint32_t[]", len(code) // 4)
        api.ffi.memmove(words, code, len(code))
        info = api.struct("VkShaderModuleCreateInfo", codeSize=len(code), pCode=words)
        module = api.create("vkCreateShaderModule", "VkShaderModule", self._device, info)
        try:
            name = api.ffi.new("char[]", b"main")
            stage = api.struct("VkPipelineShaderStageCreateInfo", stage=vk.STAGE_COMPUTE, module=module, pName=name)
            create = api.struct("VkComputePipelineCreateInfo", stage=stage[0], layout=layout, basePipelineIndex=-1)
            made = api.ffi.new("VkPipeline *")
            api.call("vkCreateComputePipelines", self._device, self._cache, 1, create, api.ffi.NULL, made)
        finally:
            api.library.vkDestroyShaderModule(self._device, module, api.ffi.NULL)
        return Pipeline(made[0], layout, self._set_layouts[kernel.buffers])

    def _layout(self, kernel: Kernel) -> int:
        key = kernel.buffers, kernel.scalar_bytes
        if key not in self._layouts:
            api = self._api
            sets = api.array("VkDescriptorSetLayout", [self._set_layout(kernel.buffers)])
            constants = api.struct("VkPushConstantRange", stageFlags=vk.STAGE_COMPUTE, size=kernel.scalar_bytes)
            info = api.struct("VkPipelineLayoutCreateInfo", setLayoutCount=1, pSetLayouts=sets,
                              pushConstantRangeCount=int(kernel.scalar_bytes > 0), pPushConstantRanges=constants)
            self._layouts[key] = api.create("vkCreatePipelineLayout", "VkPipelineLayout", self._device, info)
        return self._layouts[key]

    def _set_layout(self, buffers: int) -> int:
        if buffers not in self._set_layouts:
            api = self._api
            bindings = api.array("VkDescriptorSetLayoutBinding", [
                api.struct("VkDescriptorSetLayoutBinding", binding=i, descriptorType=vk.DESCRIPTOR_STORAGE_BUFFER,
                           descriptorCount=1, stageFlags=vk.STAGE_COMPUTE) for i in range(buffers)])
            info = api.struct("VkDescriptorSetLayoutCreateInfo", bindingCount=buffers, pBindings=bindings)
            self._set_layouts[buffers] = api.create("vkCreateDescriptorSetLayout", "VkDescriptorSetLayout",
                                                    self._device, info)
        return self._set_layouts[buffers]

    def close(self) -> None:
        """Store the cache and destroy everything."""
        api, device, null = self._api, self._device, self._api.ffi.NULL
        if self._made:
            self._store()
        for pipeline in self._made.values():
            api.library.vkDestroyPipeline(device, pipeline.pipeline, null)
        for layout in self._layouts.values():
            api.library.vkDestroyPipelineLayout(device, layout, null)
        for set_layout in self._set_layouts.values():
            api.library.vkDestroyDescriptorSetLayout(device, set_layout, null)
        api.library.vkDestroyPipelineCache(device, self._cache, null)

    def _store(self) -> None:
        """Write what the driver would like to find next time; only time is lost where that does not work."""
        api, size = self._api, self._api.ffi.new("size_t *")
        if api.library.vkGetPipelineCacheData(self._device, self._cache, size, api.ffi.NULL) != vk.SUCCESS:
            return
        data = api.ffi.new("uint8_t[]", size[0])
        if api.library.vkGetPipelineCacheData(self._device, self._cache, size, data) == vk.SUCCESS:
            write_cache(self._path, bytes(api.ffi.buffer(data, size[0])))


def cache_path(identity: bytes) -> Path:
    """The user's file for a driver and device."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dflashc" / "pipelines" / f"{identity.hex()}.bin"


def read_cache(path: Path) -> bytes:
    """What `write_cache` wrote; nothing where there is nothing, or something else: drivers trust these bytes."""
    try:
        if path.stat().st_size > _MOST_CACHE_BYTES:
            return b""
        stored = path.read_bytes()
    except OSError:
        return b""
    digest, data = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else b""


def write_cache(path: Path, data: bytes) -> None:
    """Store `data` with its hash, whole or not at all."""
    if read_cache(path) == data:
        return
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(hashlib.sha256(data).digest() + data)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
