"""GPUs through Vulkan 1.2 and later, with nothing but the loader and a driver on the machine."""

from __future__ import annotations

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.driver import GpuInfo
from dflashc.runtime.device.kernels import KernelTable
from dflashc.runtime.device.vulkan.adapters import instance, list_adapters
from dflashc.runtime.device.vulkan.api import load_api
from dflashc.runtime.device.vulkan.driver import VulkanDriver
from dflashc.runtime.manifest import Requirements


def find_gpus() -> list[GpuInfo]:
    """All devices that drivers show, in the loader's order. Raises `TargetError` without loader or driver."""
    api = load_api()
    with instance(api) as of_instance:
        return [adapter.info for adapter in list_adapters(api, of_instance)]


def refusal(info: GpuInfo, need: Requirements, allow_ptx: bool) -> str:
    """SPIR-V is for all devices; what differs are features."""
    return ""


def open_driver(index: int, artefact: Artefact, table: KernelTable, allow_ptx: bool) -> tuple[VulkanDriver, list[str]]:
    """The device with this index in `find_gpus`, ready for the kernels of an artefact; and no notes."""
    return VulkanDriver(load_api(), index, table, artefact.manifest.requirements.features), []
