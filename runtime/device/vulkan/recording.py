"""Command buffers: launches, copies and time stamps, written once.

Knows what orders them; nothing of when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflashc.runtime.device.driver import Call
from dflashc.runtime.device.vulkan import definitions as vk
from dflashc.runtime.device.vulkan.api import Api
from dflashc.runtime.device.vulkan.pipelines import Pipeline

_WRITES = vk.ACCESS_SHADER_WRITE | vk.ACCESS_TRANSFER_WRITE
_SHADER = vk.ACCESS_SHADER_READ | vk.ACCESS_SHADER_WRITE
_TRANSFER = vk.ACCESS_TRANSFER_READ | vk.ACCESS_TRANSFER_WRITE
_WRITERS = vk.PIPELINE_COMPUTE | vk.PIPELINE_TRANSFER
_COMPUTE = 1  # bind point


@dataclass(frozen=True)
class Bound:
    """Calls with their pipelines and descriptor sets. `pool` owns the sets; 0 where there are none."""

    calls: tuple[tuple[Call, Pipeline, Any], ...]
    pool: int


class Commands:
    """Writes command buffers of a device."""

    def __init__(self, api: Api, device: Any, queue_family: int) -> None:
        self._api = api
        self._device = device
        info = api.struct("VkCommandPoolCreateInfo", flags=vk.POOL_RESET_COMMAND_BUFFERS,
                          queueFamilyIndex=queue_family)
        self._pool = api.create("vkCreateCommandPool", "VkCommandPool", device, info)
        struct = api.struct
        # Before everything: what earlier submissions wrote, whichever way.
        self._before_launches = struct("VkMemoryBarrier", srcAccessMask=_WRITES, dstAccessMask=_SHADER)
        self._before_transfer = struct("VkMemoryBarrier", srcAccessMask=_WRITES, dstAccessMask=_TRANSFER)
        self._between = struct("VkMemoryBarrier", srcAccessMask=vk.ACCESS_SHADER_WRITE, dstAccessMask=_SHADER)
        # After everything: the host reads once a fence has told it.
        self._leave = struct("VkMemoryBarrier", srcAccessMask=_WRITES, dstAccessMask=vk.ACCESS_HOST_READ)

    def close(self) -> None:
        """Destroy the pool, and all command buffers with it."""
        self._api.library.vkDestroyCommandPool(self._device, self._pool, self._api.ffi.NULL)

    def new(self) -> Any:
        """A command buffer, as an array of one."""
        info = self._api.struct("VkCommandBufferAllocateInfo", commandPool=self._pool, commandBufferCount=1)
        buffers = self._api.ffi.new("VkCommandBuffer[1]")
        self._api.call("vkAllocateCommandBuffers", self._device, info, buffers)
        return buffers

    def free(self, buffers: Any) -> None:
        self._api.library.vkFreeCommandBuffers(self._device, self._pool, 1, buffers)

    # Launches --------------------------------------------------------------------------------------------------------

    def bind(self, calls: Sequence[Call], pipelines: Callable[[Any], Pipeline]) -> Bound:
        """Descriptor sets for launches."""
        api, null = self._api, self._api.ffi.NULL
        ready = [pipelines(call.kernel) for call in calls]
        total = sum(len(call.buffers) for call in calls)
        if not total:
            return Bound(tuple((c, p, null) for c, p in zip(calls, ready, strict=True)), 0)
        size = api.struct("VkDescriptorPoolSize", type=vk.DESCRIPTOR_STORAGE_BUFFER, descriptorCount=total)
        info = api.struct("VkDescriptorPoolCreateInfo", maxSets=len(calls), poolSizeCount=1, pPoolSizes=size)
        pool = api.create("vkCreateDescriptorPool", "VkDescriptorPool", self._device, info)
        try:
            layouts = api.array("VkDescriptorSetLayout", [p.set_layout for p in ready])
            info = api.struct("VkDescriptorSetAllocateInfo", descriptorPool=pool, descriptorSetCount=len(calls),
                              pSetLayouts=layouts)
            sets = api.ffi.new("VkDescriptorSet[]", len(calls))
            api.call("vkAllocateDescriptorSets", self._device, info, sets)
        except BaseException:
            api.library.vkDestroyDescriptorPool(self._device, pool, null)
            raise
        self._write_sets(calls, sets, total)
        one = [api.ffi.new("VkDescriptorSet[1]", [s]) for s in sets]
        return Bound(tuple(zip(calls, ready, one, strict=True)), pool)

    def _write_sets(self, calls: Sequence[Call], sets: Any, total: int) -> None:
        ffi = self._api.ffi
        infos, writes = ffi.new("VkDescriptorBufferInfo[]", total), ffi.new("VkWriteDescriptorSet[]", total)
        at = 0
        for call, one in zip(calls, sets, strict=True):
            for number, binding in enumerate(call.buffers):
                info, write = infos[at], writes[at]
                info.buffer, info.offset, info.range = binding.block.buffer, binding.offset, binding.nbytes
                write.sType = vk.STRUCTURE_TYPES["VkWriteDescriptorSet"]
                write.dstSet, write.dstBinding, write.descriptorCount = one, number, 1
                write.descriptorType, write.pBufferInfo = vk.DESCRIPTOR_STORAGE_BUFFER, infos + at
                at += 1
        self._api.library.vkUpdateDescriptorSets(self._device, total, writes, 0, ffi.NULL)

    def unbind(self, bound: Bound) -> None:
        """Destroy the descriptor sets."""
        if bound.pool:
            self._api.library.vkDestroyDescriptorPool(self._device, bound.pool, self._api.ffi.NULL)

    def write_launches(self, buffers: Any, bound: Bound) -> None:
        """Launches with a barrier behind each that asks for one."""
        commands = buffers[0]
        self._begin(commands, 0)
        self._order(commands, _WRITERS, vk.PIPELINE_COMPUTE, self._before_launches)
        for call, pipeline, one in bound.calls:
            self._launch(commands, call, pipeline, one)
            if call.barrier:
                self._order(commands, vk.PIPELINE_COMPUTE, vk.PIPELINE_COMPUTE, self._between)
        self._end(commands)

    def write_timed(self, buffers: Any, bound: Bound, queries: int) -> None:
        """Launches one by one, with a time stamp before the first and behind each."""
        commands, library = buffers[0], self._api.library
        self._begin(commands, 0)
        library.vkCmdResetQueryPool(commands, queries, 0, len(bound.calls) + 1)
        self._order(commands, _WRITERS, vk.PIPELINE_COMPUTE, self._before_launches)
        library.vkCmdWriteTimestamp(commands, vk.PIPELINE_BOTTOM, queries, 0)
        for index, (call, pipeline, one) in enumerate(bound.calls):
            self._launch(commands, call, pipeline, one)
            self._order(commands, vk.PIPELINE_COMPUTE, vk.PIPELINE_COMPUTE, self._between)
            library.vkCmdWriteTimestamp(commands, vk.PIPELINE_BOTTOM, queries, index + 1)
        self._end(commands)

    def _launch(self, commands: Any, call: Call, pipeline: Pipeline, one: Any) -> None:
        library, null = self._api.library, self._api.ffi.NULL
        library.vkCmdBindPipeline(commands, _COMPUTE, pipeline.pipeline)
        if call.buffers:
            library.vkCmdBindDescriptorSets(commands, _COMPUTE, pipeline.layout, 0, 1, one, 0, null)
        if call.scalars:
            library.vkCmdPushConstants(commands, pipeline.layout, vk.STAGE_COMPUTE, 0, len(call.scalars),
                                       self._api.ffi.from_buffer(call.scalars))
        library.vkCmdDispatch(commands, call.groups, 1, 1)

    # Transfers -------------------------------------------------------------------------------------------------------

    def write_transfer(self, buffers: Any, transfer: Callable[[Any], None]) -> None:
        """One copy or fill, which `transfer(commands)` writes, to be submitted once."""
        commands = buffers[0]
        self._begin(commands, vk.ONE_TIME_SUBMIT)
        self._order(commands, _WRITERS, vk.PIPELINE_TRANSFER, self._before_transfer)
        transfer(commands)
        self._end(commands)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _begin(self, commands: Any, flags: int) -> None:
        self._api.call("vkBeginCommandBuffer", commands, self._api.struct("VkCommandBufferBeginInfo", flags=flags))

    def _end(self, commands: Any) -> None:
        self._order(commands, _WRITERS, vk.PIPELINE_HOST, self._leave)
        self._api.call("vkEndCommandBuffer", commands)

    def _order(self, commands: Any, before: int, after: int, barrier: Any) -> None:
        null = self._api.ffi.NULL
        self._api.library.vkCmdPipelineBarrier(commands, before, after, 0, 1, barrier, 0, null, 0, null)
