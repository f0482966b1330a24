"""The Vulkan loader under watch: counts what is alive, fails any call, and can take the device for a discrete one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflashc.runtime.device.vulkan import definitions as vk
from dflashc.runtime.device.vulkan.api import Api

_CREATES = {
    "vkCreateInstance", "vkCreateDevice", "vkCreateFence", "vkAllocateMemory", "vkCreateBuffer", "vkCreateShaderModule",
    "vkCreatePipelineCache", "vkCreateComputePipelines", "vkCreatePipelineLayout", "vkCreateDescriptorSetLayout",
    "vkCreateDescriptorPool", "vkCreateQueryPool", "vkCreateCommandPool",
}
_OF_THE_DEVICE = {"vkQueueSubmit", "vkWaitForFences", "vkDeviceWaitIdle", "vkGetQueryPoolResults"}
"""Calls that can find the device lost; others run out of memory."""


class WatchedVulkan:
    """Stands in for `Api.library`.

    Attributes
    ----------
    names : list of str
        Calls so far that return a result.
    fail_at : int or None
        Number of the call to fail, from 1.
    failed : str
        Name of the call that was failed.
    negligible : set of str
        Calls whose failure costs nothing: the pipeline cache is not stored, and a device that is closed may be lost.
    live : set
        Handles that were created and not destroyed, as (kind, handle).
    stuck : bool
        Whether what was submitted is never done.
    """

    negligible = frozenset({"vkGetPipelineCacheData", "vkQueueSubmit", "vkWaitForFences", "vkResetFences"})

    def __init__(self, library: Any, discrete: bool = False) -> None:
        self.names: list[str] = []
        self.fail_at: int | None = None
        self.failed = ""
        self.live: set[tuple[str, int]] = set()
        self.stuck = False
        self._library = library
        self._discrete = discrete

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def watched(*arguments: Any) -> Any:
            if name.startswith(("vkDestroy", "vkFreeMemory")):
                self._destroyed(name, arguments)
            result = function(*arguments)
            if name == "vkGetPhysicalDeviceProperties2" and self._discrete:
                arguments[1].properties.deviceType = 2
            if result is None:
                return None
            self.names.append(name)
            if len(self.names) == self.fail_at:
                self.failed = name
                return vk.DEVICE_LOST if name in _OF_THE_DEVICE else vk.OUT_OF_DEVICE_MEMORY
            if name == "vkWaitForFences" and self.stuck:
                return vk.TIMEOUT
            if name in _CREATES and result == vk.SUCCESS:
                self.live.add((_kind(name), _number(arguments[-1][0])))
            return result

        def refused(*arguments: Any) -> Any:
            self.names.append(name)
            self.failed = name
            return vk.OUT_OF_DEVICE_MEMORY

        # What would have to be destroyed is not created; other calls are made, and then reported as failed.
        return refused if name in _CREATES and len(self.names) + 1 == self.fail_at else watched

    def _destroyed(self, name: str, arguments: tuple[Any, ...]) -> None:
        handle = arguments[0] if name in ("vkDestroyInstance", "vkDestroyDevice") else arguments[1]
        assert (_kind(name), _number(handle)) in self.live, f"{name} of what is not there"
        self.live.remove((_kind(name), _number(handle)))


def _kind(function: str) -> str:
    """ "Buffer" of vkCreateBuffer and vkDestroyBuffer alike."""
    for verb in ("Create", "Destroy", "Allocate", "Free"):
        function = function.removeprefix(f"vk{verb}")
    return "Pipeline" if function == "ComputePipelines" else function


def _number(handle: Any) -> int:
    """A handle, pointer or not, as a number."""
    return handle if isinstance(handle, int) else int(str(handle).rsplit(" ", 1)[1].rstrip(">"), 16)


def watch(api: Api, discrete: bool = False) -> tuple[Api, WatchedVulkan]:
    """An API of its own over the same loader, and its watch."""
    library = WatchedVulkan(api.library, discrete)
    return Api(api.ffi, library), library
