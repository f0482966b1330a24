"""An open Vulkan device: memory, submissions and one fence to wait for.

What is submitted runs in order on one queue; each submission begins with a barrier against all before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflashc.runtime.device.driver import HANG_SECONDS, Call, Place
from dflashc.runtime.device.kernels import KernelTable
from dflashc.runtime.device.vulkan import definitions as vk
from dflashc.runtime.device.vulkan.adapters import Adapter, available_memory, enabled, instance, list_adapters
from dflashc.runtime.device.vulkan.api import Api, failure
from dflashc.runtime.device.vulkan.pipelines import Pipelines
from dflashc.runtime.device.vulkan.recording import Bound, Commands
from dflashc.runtime.errors import TargetError

_LOOK = 200_000_000
"""Nanoseconds after which a wait looks up, so that Ctrl-C is heard."""

_USAGE = vk.USAGE_STORAGE | vk.USAGE_COPY_SOURCE | vk.USAGE_COPY_TARGET


@dataclass(eq=False)
class VulkanBlock:
    """A buffer with memory of its own."""

    buffer: int
    memory: int
    nbytes: int
    mapped: np.ndarray | None


@dataclass(eq=False)
class Recording:
    """Launches in a command buffer; in another with time stamps, once they are asked for."""

    bound: Bound
    commands: Any
    submit: Any
    timed: tuple[Any, Any, int] | None = None


class VulkanDriver:
    """See `driver.Driver`.

    Parameters
    ----------
    index : int
        Of the device, as `list_adapters` lists them.
    required : sequence of str
        Features and extensions that the kernels need.
    hang_seconds : float
        Time limit of a wait.
    """

    def __init__(self, api: Api, index: int, table: KernelTable, required: Sequence[str],
                 hang_seconds: float = HANG_SECONDS) -> None:
        self._api = api
        self._hangs = False
        self._fenced: bool | None = False  # whether the fence will tell; None while that is not known
        self._blocks: set[VulkanBlock] = set()
        self._recordings: set[Recording] = set()
        self._transfers: list[tuple[Any, Any]] = []
        self._transfers_used = 0
        with ExitStack() as opened:
            self._adapter: Adapter = list_adapters(api, opened.enter_context(instance(api)))[index]
            self.info = self._adapter.info
            # A software device is only slow.
            self._hang_seconds = math.inf if self.info.kind == "software" else hang_seconds
            self._device = self._open_device(required)
            opened.callback(api.library.vkDestroyDevice, self._device, api.ffi.NULL)
            queue = api.ffi.new("VkQueue *")
            api.library.vkGetDeviceQueue(self._device, self._adapter.queue_family, 0, queue)
            self._queue = queue[0]
            self._fence = api.create("vkCreateFence", "VkFence", self._device, api.struct("VkFenceCreateInfo"))
            opened.callback(api.library.vkDestroyFence, self._device, self._fence, api.ffi.NULL)
            self._fences = api.array("VkFence", [self._fence])
            self._commands = Commands(api, self._device, self._adapter.queue_family)
            opened.callback(self._commands.close)
            self._pipelines = Pipelines(api, self._device, table, self._adapter.identity)
            opened.callback(self._pipelines.close)
            self._opened = opened.pop_all()

    def _open_device(self, required: Sequence[str]) -> Any:
        api = self._api
        features, extensions = enabled(api, self._adapter, required)
        names = [api.ffi.new("char[]", name.encode()) for name in extensions]
        queue = api.struct("VkDeviceQueueCreateInfo", queueFamilyIndex=self._adapter.queue_family, queueCount=1,
                           pQueuePriorities=api.array("float", [1.0]))
        info = api.struct("VkDeviceCreateInfo", pNext=features, queueCreateInfoCount=1, pQueueCreateInfos=queue,
                          enabledExtensionCount=len(names), ppEnabledExtensionNames=api.array("char *", names))
        return api.create("vkCreateDevice", "VkDevice", self._adapter.handle, info)

    # Memory ----------------------------------------------------------------------------------------------------------

    def available_memory(self) -> int:
        return available_memory(self._api, self._adapter)

    def allocate(self, nbytes: int, place: Place) -> VulkanBlock:
        api = self._api
        buffer = api.create("vkCreateBuffer", "VkBuffer", self._device,
                            api.struct("VkBufferCreateInfo", size=nbytes, usage=_USAGE))
        memory = 0
        try:
            memory, visible = self._take_memory(buffer, place)
            api.call("vkBindBufferMemory", self._device, buffer, memory, 0)
            block = VulkanBlock(buffer, memory, nbytes, self._map(memory, nbytes) if visible else None)
        except BaseException:
            api.library.vkDestroyBuffer(self._device, buffer, api.ffi.NULL)
            if memory:
                api.library.vkFreeMemory(self._device, memory, api.ffi.NULL)
            raise
        self._blocks.add(block)
        return block

    def _take_memory(self, buffer: int, place: Place) -> tuple[int, bool]:
        """Memory for a buffer, and whether to map it; the next type is tried where one is full."""
        api, need = self._api, self._api.ffi.new("VkMemoryRequirements *")
        api.library.vkGetBufferMemoryRequirements(self._device, buffer, need)
        failed = failure("vkAllocateMemory", vk.OUT_OF_DEVICE_MEMORY)
        for choice in self._adapter.memory_choices(place):
            if need.memoryTypeBits >> choice & 1:
                info = api.struct("VkMemoryAllocateInfo", allocationSize=need.size, memoryTypeIndex=choice)
                memory = api.ffi.new("VkDeviceMemory *")
                result = api.library.vkAllocateMemory(self._device, info, api.ffi.NULL, memory)
                if result == vk.SUCCESS:
                    return memory[0], place is not Place.DEVICE or self._adapter.unified
                failed = failure("vkAllocateMemory", result)
                if result not in (vk.OUT_OF_DEVICE_MEMORY, vk.OUT_OF_HOST_MEMORY):
                    break
        raise failed

    def _map(self, memory: int, nbytes: int) -> np.ndarray:
        api, address = self._api, self._api.ffi.new("void **")
        api.call("vkMapMemory", self._device, memory, 0, vk.WHOLE_SIZE, 0, address)
        return np.frombuffer(api.ffi.buffer(address[0], nbytes), np.uint8)

    def release(self, block: VulkanBlock) -> None:
        self._blocks.remove(block)
        self._free(block)

    def _free(self, block: VulkanBlock) -> None:
        self._api.library.vkDestroyBuffer(self._device, block.buffer, self._api.ffi.NULL)
        self._api.library.vkFreeMemory(self._device, block.memory, self._api.ffi.NULL)

    # Transfers -------------------------------------------------------------------------------------------------------

    def clear(self, block: VulkanBlock) -> None:
        fill = self._api.library.vkCmdFillBuffer
        self._transfer(lambda commands: fill(commands, block.buffer, 0, vk.WHOLE_SIZE, 0))

    def copy(self, source: VulkanBlock, source_offset: int, target: VulkanBlock, target_offset: int,
             nbytes: int) -> None:
        region = self._api.struct("VkBufferCopy", srcOffset=source_offset, dstOffset=target_offset, size=nbytes)
        copy = self._api.library.vkCmdCopyBuffer
        self._transfer(lambda commands: copy(commands, source.buffer, target.buffer, 1, region))

    def _transfer(self, transfer: Callable[[Any], None]) -> None:
        if self._transfers_used == len(self._transfers):
            commands = self._commands.new()
            self._transfers.append((commands, self._submission(commands)))
        commands, submit = self._transfers[self._transfers_used]
        self._transfers_used += 1
        self._commands.write_transfer(commands, transfer)
        self._api.call("vkQueueSubmit", self._queue, 1, submit, 0)

    def _submission(self, commands: Any) -> Any:
        return self._api.struct("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=commands)

    # Runs ------------------------------------------------------------------------------------------------------------

    def record(self, calls: Sequence[Call]) -> Recording:
        bound = self._commands.bind(calls, self._pipelines.get)
        commands = None
        try:
            commands = self._commands.new()
            self._commands.write_launches(commands, bound)
        except BaseException:
            self._commands.unbind(bound)
            if commands is not None:
                self._commands.free(commands)
            raise
        recording = Recording(bound, commands, self._submission(commands))
        self._recordings.add(recording)
        return recording

    def discard(self, recording: Recording) -> None:
        self._recordings.remove(recording)
        self._destroy(recording)

    def _destroy(self, recording: Recording) -> None:
        self._commands.free(recording.commands)
        self._commands.unbind(recording.bound)
        if recording.timed is not None:
            self._commands.free(recording.timed[0])
            self._api.library.vkDestroyQueryPool(self._device, recording.timed[2], self._api.ffi.NULL)

    def submit(self, recording: Recording) -> None:
        self._submit(1, recording.submit)

    def _submit(self, count: int, submit: Any) -> None:
        """Submit with the fence, which tells when this and all before it is done."""
        self._fenced = None
        self._api.call("vkQueueSubmit", self._queue, count, submit, self._fence)
        self._fenced = True

    def wait(self) -> None:
        api = self._api
        if self._hangs:
            raise failure("vkWaitForFences", vk.TIMEOUT)
        if self._fenced is None:  # an interrupt came, or a call failed
            api.call("vkDeviceWaitIdle", self._device)
        else:
            if not self._fenced:
                self._submit(0, api.ffi.NULL)
            self._wait_for_fence()
        self._fenced = None
        api.call("vkResetFences", self._device, 1, self._fences)
        self._fenced = False
        self._transfers_used = 0

    def _wait_for_fence(self) -> None:
        ends = time.monotonic() + self._hang_seconds
        while self._api.call("vkWaitForFences", self._device, 1, self._fences, 1, _LOOK) == vk.TIMEOUT:
            if time.monotonic() > ends:
                self._hangs = True
                raise failure("vkWaitForFences", vk.TIMEOUT)

    def time(self, recording: Recording) -> np.ndarray:
        bits, count = self._adapter.timestamp_bits, len(recording.bound.calls)
        if not bits:
            raise TargetError(f"{self.info.name} has no time stamps, so launches cannot be timed: use another device")
        if recording.timed is None:
            recording.timed = self._record_timed(recording.bound)
        _, submit, queries = recording.timed
        self._submit(1, submit)
        self.wait()
        stamps = np.empty(count + 1, np.uint64)
        data = self._api.ffi.from_buffer(stamps)
        result = self._api.call("vkGetQueryPoolResults", self._device, queries, 0, count + 1, stamps.nbytes, data, 8,
                                vk.RESULTS_OF_64_BITS)
        if result == vk.NOT_READY:
            raise failure("vkGetQueryPoolResults", result)
        ticks = np.diff(stamps) & np.uint64((1 << bits) - 1)
        return ticks * (self._adapter.timestamp_period * 1e-9)

    def _record_timed(self, bound: Bound) -> tuple[Any, Any, int]:
        api = self._api
        info = api.struct("VkQueryPoolCreateInfo", queryType=vk.QUERY_TIMESTAMP, queryCount=len(bound.calls) + 1)
        queries = api.create("vkCreateQueryPool", "VkQueryPool", self._device, info)
        commands = None
        try:
            commands = self._commands.new()
            self._commands.write_timed(commands, bound, queries)
        except BaseException:
            if commands is not None:
                self._commands.free(commands)
            api.library.vkDestroyQueryPool(self._device, queries, api.ffi.NULL)
            raise
        return commands, self._submission(commands), queries

    # End -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy everything. What a device that hangs still uses is left to the end of the process."""
        if self._hangs:
            return
        with suppress(TargetError):  # a device that is lost runs nothing
            self.wait()
        if self._hangs:
            return
        for recording in self._recordings:
            self._destroy(recording)
        for block in self._blocks:
            self._free(block)
        self._recordings, self._blocks = set(), set()
        self._opened.close()
