"""Compiles SPIR-V modules with Mesa's driver for AMD GPUs, which needs no GPU for that, and counts spilled registers.

Run as `python -m tests.targets.vulkan.radv FOLDER` with the environment of `ENVIRONMENT`: the driver prints its
statistics of every pipeline on standard error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from dflashc.runtime.device.kernels import Kernel, KernelTable
from dflashc.runtime.device.vulkan.adapters import enabled, instance, list_adapters
from dflashc.runtime.device.vulkan.api import load_api
from dflashc.runtime.device.vulkan.pipelines import Pipelines

ICD = Path("/usr/share/vulkan/icd.d/radeon_icd.x86_64.json")
ENVIRONMENT = {"VK_ICD_FILENAMES": str(ICD), "VK_DRIVER_FILES": str(ICD), "RADV_FORCE_FAMILY": "gfx1100",
               "RADV_DEBUG": "shaderstats,nocache"}
_SECONDS = 900


def spilled_registers(artefact: Path, features: list[str]) -> dict[str, int]:
    """Scalar and vector registers that each kernel of an artefact's folder keeps in memory, on gfx1100."""
    environment = os.environ | ENVIRONMENT | {"XDG_CACHE_HOME": str(artefact)}
    done = subprocess.run([sys.executable, "-m", __name__, str(artefact), *features], capture_output=True, text=True,
                          check=False, timeout=_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-1000:]
    found = {}
    for part in done.stderr.split("kernel=")[1:]:
        symbol, _, statistics = part.partition("\n")
        spilled = re.findall(r"Spilled [SV]GPRs: (\d+)", statistics)
        assert spilled, f"no statistics of {symbol}: {statistics[:200]}"
        found[symbol] = sum(map(int, spilled))
    return found


def _compile_all(folder: Path, features: list[str]) -> None:
    listing = json.loads((folder / "kernels.json").read_text())
    table = KernelTable.from_json(listing, folder / "kernels.bin")
    api = load_api()
    with instance(api) as of_instance:
        (adapter,) = list_adapters(api, of_instance)
        missing = sorted(set(features) - adapter.info.features)
        assert not missing, f"{adapter.info.name} lacks {missing}"
        device = api.create("vkCreateDevice", "VkDevice", adapter.handle, _device_info(api, adapter, features))
        pipelines = Pipelines(api, device, table, adapter.identity)
        for kernel in table.kernels.values():
            _announce(kernel)
            pipelines.get(kernel)
    os._exit(0)  # a device without hardware cannot be waited for


def _device_info(api, adapter, features):
    chain, extensions = enabled(api, adapter, features)
    names = api.array("char *", [api.ffi.new("char[]", name.encode()) for name in extensions])
    queue = api.struct("VkDeviceQueueCreateInfo", queueFamilyIndex=adapter.queue_family, queueCount=1,
                       pQueuePriorities=api.array("float", [1.0]))
    return api.struct("VkDeviceCreateInfo", pNext=chain, queueCreateInfoCount=1, pQueueCreateInfos=queue,
                      enabledExtensionCount=len(extensions), ppEnabledExtensionNames=names)


def _announce(kernel: Kernel) -> None:
    os.write(2, f"kernel={kernel.symbol}\n".encode())


if __name__ == "__main__":
    _compile_all(Path(sys.argv[1]), sys.argv[2:])
