"""GPUs as Vulkan shows them: names, limits, memory, features; and which of them an artefact can use.

Owns the instance. Knows nothing of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflashc.runtime.device.driver import ALIGNMENT, GpuInfo, Limits, Place
from dflashc.runtime.device.kernels import SCALAR_BYTES
from dflashc.runtime.device.vulkan import definitions as vk
from dflashc.runtime.device.vulkan.api import Api
from dflashc.runtime.errors import TargetError

_BUDGET = "VK_EXT_memory_budget"
_PROMOTED = {"VK_KHR_shader_integer_dot_product": vk.VERSION_1_3}
"""Extensions that are part of a version, so that a device of it need not name them."""

_MAPPED = vk.MEMORY_HOST_VISIBLE | vk.MEMORY_HOST_COHERENT
_PLAIN = vk.MEMORY_DEVICE_LOCAL | _MAPPED | vk.MEMORY_HOST_CACHED


@dataclass(frozen=True)
class Adapter:
    """A physical device.

    Attributes
    ----------
    extensions : frozenset of str
        Names that it lists.
    queue_family : int
        The one to compute with.
    timestamp_bits : int
        Valid bits of a time stamp of that family; 0 where it has none.
    timestamp_period : float
        Nanoseconds of a tick.
    memory_types : tuple
        (property flags, heap index) of each type.
    heaps : tuple of int
        Bytes of each heap.
    identity : bytes
        Of driver and device, for what is cached per driver.
    """

    handle: Any
    info: GpuInfo
    version: int
    extensions: frozenset[str]
    queue_family: int
    timestamp_bits: int
    timestamp_period: float
    memory_types: tuple[tuple[int, int], ...]
    heaps: tuple[int, ...]
    identity: bytes

    @property
    def unified(self) -> bool:
        """Whether host and device have the same memory, so that the host may write where kernels read."""
        return self.info.kind in ("integrated", "software")

    def memory_choices(self, place: Place) -> list[int]:
        """Memory types for a place, the best first."""
        # Others are for special uses, some of them only with features that are not turned on.
        plain = [i for i, (flags, _) in enumerate(self.memory_types) if not flags & ~_PLAIN]
        if place is Place.DEVICE and not self.unified:
            fits = [i for i in plain if self.memory_types[i][0] & vk.MEMORY_DEVICE_LOCAL]
            return sorted(fits, key=lambda i: bool(self.memory_types[i][0] & vk.MEMORY_HOST_VISIBLE))
        fits = [i for i in plain if self.memory_types[i][0] & _MAPPED == _MAPPED]
        wanted = vk.MEMORY_DEVICE_LOCAL if place is Place.DEVICE else vk.MEMORY_HOST_CACHED
        return sorted(fits, key=lambda i: not self.memory_types[i][0] & wanted)


@contextmanager
def instance(api: Api) -> Iterator[Any]:
    """An instance for as long as the block runs. Raises `TargetError` where there is no driver."""
    version = api.ffi.new("uint32_t *")
    api.call("vkEnumerateInstanceVersion", version)
    if version[0] < vk.VERSION_1_2:
        raise TargetError(f"Vulkan {_version(version[0])} found, 1.2 expected: update libvulkan1")
    name = api.ffi.new("char[]", b"dflashc")
    application = api.struct("VkApplicationInfo", pApplicationName=name, pEngineName=name, apiVersion=vk.VERSION_1_3)
    info = api.struct("VkInstanceCreateInfo", pApplicationInfo=application)
    handle = api.ffi.new("VkInstance *")
    api.call("vkCreateInstance", info, api.ffi.NULL, handle)
    try:
        yield handle[0]
    finally:
        api.library.vkDestroyInstance(handle[0], api.ffi.NULL)


def list_adapters(api: Api, of_instance: Any) -> list[Adapter]:
    """All physical devices, in the loader's order."""
    return [_adapter(api, handle) for handle in api.enumerate("vkEnumeratePhysicalDevices", "VkPhysicalDevice",
                                                              of_instance)]


def _adapter(api: Api, handle: Any) -> Adapter:
    limits3 = api.struct("VkPhysicalDeviceMaintenance3Properties")
    driver = api.struct("VkPhysicalDeviceDriverProperties", pNext=limits3)
    ids = api.struct("VkPhysicalDeviceIDProperties", pNext=driver)
    floats = api.struct("VkPhysicalDeviceFloatControlsProperties", pNext=ids)
    properties = api.struct("VkPhysicalDeviceProperties2", pNext=floats)
    api.library.vkGetPhysicalDeviceProperties2(handle, properties)
    found = properties.properties
    version = found.apiVersion
    extensions = frozenset(api.text(e.extensionName) for e in api.enumerate(
        "vkEnumerateDeviceExtensionProperties", "VkExtensionProperties", handle, api.ffi.NULL))
    memory = api.struct("VkPhysicalDeviceMemoryProperties2")
    api.library.vkGetPhysicalDeviceMemoryProperties2(handle, memory)
    table = memory.memoryProperties
    types = tuple((t.propertyFlags, t.heapIndex) for t in table.memoryTypes[0 : table.memoryTypeCount])
    heaps = tuple(h.size for h in table.memoryHeaps[0 : table.memoryHeapCount])
    family, bits = _queue_family(api, handle)
    kind = vk.DEVICE_KINDS.get(found.deviceType, "other")
    own = {index for flags, index in types if flags & vk.MEMORY_DEVICE_LOCAL or kind == "integrated"}
    name, info = api.text(driver.driverName), api.text(driver.driverInfo)
    return Adapter(
        handle, GpuInfo(
            name=api.text(found.deviceName), kind=kind, driver=f"{name} {info}".strip(), level="",
            memory=sum(heaps[i] for i in own), limits=_limits(found.limits, limits3.maxMemoryAllocationSize),
            features=_features(api, handle, version, extensions, floats), unfit=_unfit(found, family)),
        version, extensions, family, bits, found.limits.timestampPeriod, types, heaps,
        bytes(ids.driverUUID) + bytes(found.pipelineCacheUUID))


def _limits(limits: Any, allocation: int) -> Limits:
    x, y, z = limits.maxComputeWorkGroupSize
    return Limits(groups=limits.maxComputeWorkGroupCount[0], threads=(x, y, z),
                  threads_in_all=limits.maxComputeWorkGroupInvocations, shared=limits.maxComputeSharedMemorySize,
                  buffers=min(limits.maxPerStageDescriptorStorageBuffers, limits.maxDescriptorSetStorageBuffers),
                  binding=limits.maxStorageBufferRange, allocation=allocation)


def _queue_family(api: Api, handle: Any) -> tuple[int, int]:
    """The queue family to compute with, one without graphics before others, and its time stamp bits; -1 without."""
    count = api.ffi.new("uint32_t *")
    api.library.vkGetPhysicalDeviceQueueFamilyProperties(handle, count, api.ffi.NULL)
    families = api.ffi.new("VkQueueFamilyProperties[]", count[0])
    api.library.vkGetPhysicalDeviceQueueFamilyProperties(handle, count, families)
    fits = [i for i, f in enumerate(families) if f.queueFlags & vk.QUEUE_COMPUTE and f.queueCount]
    if not fits:
        return -1, 0
    best = min(fits, key=lambda i: families[i].queueFlags & vk.QUEUE_GRAPHICS)
    return best, families[best].timestampValidBits


def _unfit(properties: Any, family: int) -> str:
    """Why no artefact can run there, "" where some can."""
    limits = properties.limits
    if properties.apiVersion < vk.VERSION_1_2:
        return f"has Vulkan {_version(properties.apiVersion)}, 1.2 is needed: update its driver"
    if family < 0:
        return "cannot compute"
    if limits.minStorageBufferOffsetAlignment > ALIGNMENT:
        return f"aligns buffers at {limits.minStorageBufferOffsetAlignment} bytes, at most {ALIGNMENT} is needed"
    if limits.maxPushConstantsSize < SCALAR_BYTES:
        return f"takes {limits.maxPushConstantsSize} bytes of push constants, {SCALAR_BYTES} are needed"
    return ""


# Features ------------------------------------------------------------------------------------------------------------


def feature_chain(api: Api, version: int, extensions: frozenset[str]) -> tuple[Any, dict[str, Any]]:
    """A `VkPhysicalDeviceFeatures2` with all structures that a device knows, and those by name."""
    names = ["VkPhysicalDeviceVulkan11Features", "VkPhysicalDeviceVulkan12Features"]
    if version >= vk.VERSION_1_3:
        names.append("VkPhysicalDeviceVulkan13Features")
    names += [structure for extension, structure in vk.EXTENSION_FEATURES.items()
              if extension in extensions and version < _PROMOTED.get(extension, version + 1)]
    chain, structures = api.ffi.NULL, {}
    for name in names:
        structures[name] = chain = api.struct(name, pNext=chain)
    head = api.struct("VkPhysicalDeviceFeatures2", pNext=chain)
    structures["VkPhysicalDeviceFeatures"] = head.features
    return head, structures


def _features(api: Api, handle: Any, version: int, extensions: frozenset[str], floats: Any) -> frozenset[str]:
    """All features, properties of float arithmetic and extensions that an artefact may require of a device."""
    if version < vk.VERSION_1_2:
        return frozenset()
    head, structures = feature_chain(api, version, extensions)
    api.library.vkGetPhysicalDeviceFeatures2(handle, head)
    found = {member for name, structure in structures.items() for member in vk.FEATURES[name]
             if getattr(structure, member)}
    promoted = {extension for extension, since in _PROMOTED.items() if version >= since}
    return frozenset(found | {m for m in vk.FLOAT_CONTROLS if getattr(floats, m)} | promoted | extensions)


def enabled(api: Api, adapter: Adapter, required: Sequence[str]) -> tuple[Any, list[str]]:
    """The feature chain that turns on what is required, and the extensions to name."""
    head, structures = feature_chain(api, adapter.version, adapter.extensions)
    wanted = set(required)
    for extension in wanted & vk.EXTENSION_FEATURES.keys():
        wanted.add(vk.FEATURES[vk.EXTENSION_FEATURES[extension]][0])
    for name, structure in structures.items():
        for member in wanted & set(vk.FEATURES[name]):
            setattr(structure, member, 1)
    return head, sorted(wanted & adapter.extensions)


# Memory --------------------------------------------------------------------------------------------------------------


def available_memory(api: Api, adapter: Adapter) -> int:
    """Bytes that device memory can still take: the driver's budget where it tells one, else all there is."""
    memory = api.struct("VkPhysicalDeviceMemoryProperties2")
    free = list(adapter.heaps)
    if _BUDGET in adapter.extensions:
        budget = api.struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
        memory = api.struct("VkPhysicalDeviceMemoryProperties2", pNext=budget)
        api.library.vkGetPhysicalDeviceMemoryProperties2(adapter.handle, memory)
        free = [max(0, budget.heapBudget[i] - budget.heapUsage[i]) for i in range(len(free))]
    return sum(free[i] for i in {adapter.memory_types[t][1] for t in adapter.memory_choices(Place.DEVICE)})


def _version(number: int) -> str:
    return f"{number >> 22 & 0x7F}.{number >> 12 & 0x3FF}"

