"""NVIDIA GPUs through CUDA's driver API, by the package cuda-bindings.

Code is for one architecture (a cubin); PTX is compiled by the driver for later ones, and only where it was allowed.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from dflashc.runtime.artefact import GPU_PTX, Artefact
from dflashc.runtime.device.driver import GpuInfo, Limits
from dflashc.runtime.device.kernels import KernelTable
from dflashc.runtime.device.streams import StreamDriver
from dflashc.runtime.errors import ArtefactError, TargetError
from dflashc.runtime.manifest import Requirements

_OUT_OF_MEMORY = 2
_NOT_READY = 600
_NON_BLOCKING = 1
_HOST_DEVICE_MAPPED = 2
_LEVEL = re.compile(r"sm_(\d+)(\d)")

ATTRIBUTES = ("MAX_BLOCK_DIM_X", "MAX_BLOCK_DIM_Y", "MAX_BLOCK_DIM_Z", "MAX_GRID_DIM_X", "MAX_THREADS_PER_BLOCK",
              "MAX_SHARED_MEMORY_PER_BLOCK", "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "INTEGRATED")


def find_gpus() -> list[GpuInfo]:
    """All GPUs, in the driver's order. Raises `TargetError` without the package or a driver."""
    driver = _load_driver()
    return [_describe(driver, number) for number in range(_call(driver, "cuDeviceGetCount"))]


def refusal(info: GpuInfo, need: Requirements, allow_ptx: bool) -> str:
    """Why a GPU cannot run code for `need.level`, "" where it can.

    A cubin runs on its own major version from its minor version on, PTX on every later GPU (CUDA C++ Programming Guide,
    "Binary Compatibility" and "PTX Compatibility").
    """
    built, found = _capability(need.level), _capability(info.level)
    if _runs_cubin(built, found) or (allow_ptx and found >= built):
        return ""
    build = f"build for cuda-{info.level.replace('_', '')}"
    if found >= built:
        return f"is {info.level}, the artefact's code is for {need.level}: {build}, or give --allow-ptx"
    return f"is {info.level}, the artefact needs {need.level} or later: {build}"


def open_driver(index: int, artefact: Artefact, table: KernelTable, allow_ptx: bool) -> tuple[StreamDriver, list[str]]:
    """The GPU with this index in `find_gpus`, with the artefact's code loaded; and a note where that is its PTX."""
    driver, level = _load_driver(), artefact.manifest.requirements.level
    info = _describe(driver, index)
    if _runs_cubin(_capability(level), _capability(info.level)):
        code, notes = table.path.read_bytes(), []
    else:  # text, which the driver reads up to a zero byte
        code = (artefact.directory / GPU_PTX).read_bytes().rstrip(b"\0") + b"\0"
        notes = [f"the artefact's code is for {level}, {info.name} is {info.level}: its driver compiles PTX instead"]
    return StreamDriver(CudaApi(driver, index, info), code), notes


class CudaApi:
    """See `streams.StreamApi`."""

    def __init__(self, driver: Any, number: int, info: GpuInfo) -> None:
        self.info = info
        self._driver = driver
        self._call = partial(_call, driver)
        self._device = self._call("cuDeviceGet", number)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)

    def activate(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def free_memory(self) -> int:
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def allocate_host(self, nbytes: int) -> tuple[int, int]:
        host = int(self._call("cuMemHostAlloc", nbytes, _HOST_DEVICE_MAPPED))
        try:
            return host, int(self._call("cuMemHostGetDevicePointer", host, 0))
        except TargetError:
            self.free_host(host)
            raise

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, 0, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def create_stream(self) -> int:
        return int(self._call("cuStreamCreate", _NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def is_done(self, stream: int) -> bool:
        (result,) = self._driver.cuStreamQuery(stream)
        if int(result) == _NOT_READY:
            return False
        _check(self._driver, "cuStreamQuery", result)
        return True

    def load(self, code: bytes) -> int:
        return int(self._call("cuModuleLoadData", code))

    def unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, symbol: str) -> int:
        return int(self._call("cuModuleGetFunction", module, symbol.encode()))

    def launch(self, function: int, groups: int, threads: tuple[int, int, int], parameters: int, stream: int) -> None:
        self._call("cuLaunchKernel", function, groups, 1, 1, *threads, 0, stream, parameters, 0)

    def begin_capture(self, stream: int) -> None:
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        return int(self._call("cuStreamEndCapture", stream))

    def instantiate(self, graph: int) -> int:
        return int(self._call("cuGraphInstantiate", graph, 0))

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphDestroy", graph)

    def launch_graph(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", executable)

    def create_event(self) -> int:
        return int(self._call("cuEventCreate", 0))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def seconds_between(self, first: int, last: int) -> float:
        return float(self._call("cuEventElapsedTime", first, last)) * 1e-3

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device)


def _load_driver() -> Any:
    """The API, initialised; nothing else of CUDA is touched before that has worked."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TargetError("CUDA devices need the Python package cuda-bindings: pip install 'dflashc[cuda]'") from error
    try:
        _call(driver, "cuInit", 0)
    except TargetError:
        raise
    except Exception as error:  # of the package, where there is no libcuda.so.1
        raise TargetError("no CUDA driver was found (libcuda.so.1): install NVIDIA's driver") from error
    return driver


def _describe(driver: Any, number: int) -> GpuInfo:
    call, names = partial(_call, driver), driver.CUdevice_attribute
    device = call("cuDeviceGet", number)
    x, y, z, groups, threads, shared, major, minor, integrated = (
        int(call("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"), device)) for name in ATTRIBUTES)
    memory = int(call("cuDeviceTotalMem", device))
    version = int(call("cuDriverGetVersion"))
    limits = Limits(groups, (x, y, z), threads, shared, buffers=1 << 10, binding=memory, allocation=memory)
    return GpuInfo(call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace"),
                   "integrated" if integrated else "discrete", f"CUDA {version // 1000}.{version % 1000 // 10}",
                   f"sm_{major}{minor}", memory, limits)


def _call(driver: Any, function: str, *arguments: Any) -> Any:
    """Call a function of the API and return what it gives, a tuple where that is several values."""
    result, *values = getattr(driver, function)(*arguments)
    _check(driver, function, result)
    return values[0] if len(values) == 1 else tuple(values)


def _check(driver: Any, function: str, result: Any) -> None:
    if int(result):
        _, name = driver.cuGetErrorName(result)
        reason = name.decode() if name else f"error {int(result)}"
        hint = "use a smaller --ctx" if int(result) == _OUT_OF_MEMORY else "see `dflashc targets`"
        raise TargetError(f"CUDA: {function} failed: {reason}: {hint}")


def _capability(level: str) -> tuple[int, int]:
    matched = _LEVEL.fullmatch(level)
    if not matched:
        raise ArtefactError(f"{level!r} is no CUDA architecture, expected one like sm_89: build again")
    return int(matched[1]), int(matched[2])


def _runs_cubin(built: tuple[int, int], found: tuple[int, int]) -> bool:
    return built[0] == found[0] and built[1] <= found[1]
