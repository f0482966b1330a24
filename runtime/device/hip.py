"""AMD GPUs through HIP's module API, by ctypes: nothing but the runtime of an installed ROCm.

Code is for one architecture and never used on another.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.driver import GpuInfo, Limits
from dflashc.runtime.device.kernels import KernelTable
from dflashc.runtime.device.streams import StreamDriver
from dflashc.runtime.errors import TargetError
from dflashc.runtime.manifest import Requirements

LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so")

_OUT_OF_MEMORY, _NO_DEVICE, _NOT_READY = 2, 100, 600
_NON_BLOCKING = 1
_HOST_MAPPED = 2
_CAPTURE_OF_THIS_THREAD = 1
_BY_ADDRESS = 4  # hipMemcpyDefault: the addresses tell the direction
_INTEGRATED = 16  # hipDeviceAttributeIntegrated
_PROPERTIES_BYTES = 1 << 14  # more than any version of hipDeviceProp_t has

_TYPES = {"o": ctypes.c_void_p, "p": ctypes.c_void_p, "s": ctypes.c_char_p, "z": ctypes.c_size_t, "u": ctypes.c_uint,
          "i": ctypes.c_int, "b": ctypes.c_ubyte}

SIGNATURES = {
    "hipInit": "u", "hipGetDeviceCount": "o", "hipSetDevice": "i", "hipDeviceGetName": "pii",
    "hipDeviceGetAttribute": "oii", "hipGetDevicePropertiesR0600": "pi", "hipDeviceTotalMem": "oi",
    "hipRuntimeGetVersion": "o", "hipMemGetInfo": "oo",
    "hipMalloc": "oz", "hipFree": "p", "hipHostMalloc": "ozu", "hipHostGetDevicePointer": "opu", "hipHostFree": "p",
    "hipMemsetD8Async": "pbzp", "hipMemcpyAsync": "ppzip",
    "hipStreamCreateWithFlags": "ou", "hipStreamDestroy": "p", "hipStreamQuery": "p",
    "hipModuleLoadData": "op", "hipModuleUnload": "p", "hipModuleGetFunction": "ops",
    "hipModuleLaunchKernel": "puuuuuuuppp",
    "hipStreamBeginCapture": "pi", "hipStreamEndCapture": "po", "hipGraphInstantiate": "opppz", "hipGraphDestroy": "p",
    "hipGraphLaunch": "pp", "hipGraphExecDestroy": "p",
    "hipEventCreate": "o", "hipEventDestroy": "p", "hipEventRecord": "pp", "hipEventElapsedTime": "opp",
}
"""Parameters: o where a result is put, p an address or handle, s a string, z a size, u, i and b integers."""

MOST_BINDING = 1 << 32
"""Bytes of a buffer that a kernel sees: kernels for ROCm find its elements by 32 bits, see `targets.rocm.ir`."""


def find_gpus() -> list[GpuInfo]:
    """All GPUs, in the runtime's order. Raises `TargetError` without ROCm."""
    hip = Hip()
    count = ctypes.c_int()
    result = hip.library.hipGetDeviceCount(ctypes.byref(count))
    if result == _NO_DEVICE:
        return []
    hip.check("hipGetDeviceCount", result)
    return [_describe(hip, number) for number in range(count.value)]


def refusal(info: GpuInfo, need: Requirements, allow_ptx: bool) -> str:
    """Why a GPU cannot run code for `need.level`, "" where it can."""
    if info.level == need.level:
        return ""
    return f"is {info.level}, the artefact's code is for {need.level}: build for rocm-{info.level}"


def open_driver(index: int, artefact: Artefact, table: KernelTable, allow_ptx: bool) -> tuple[StreamDriver, list[str]]:
    """The GPU with this index in `find_gpus`, with the artefact's code loaded; and no notes."""
    return StreamDriver(HipApi(Hip(), index), table.path.read_bytes()), []


class Hip:
    """The runtime's functions, initialised."""

    def __init__(self) -> None:
        self.library = load_library()
        for name, parameters in SIGNATURES.items():
            try:
                getattr(self.library, name).argtypes = [_TYPES[p] for p in parameters]
            except AttributeError as error:
                raise TargetError(f"the HIP runtime lacks {name}: install ROCm 6 or later") from error
        self.library.hipGetErrorName.restype = ctypes.c_char_p
        self.call("hipInit", 0)

    def call(self, function: str, *arguments: Any) -> None:
        self.check(function, getattr(self.library, function)(*arguments))

    def check(self, function: str, result: int) -> None:
        """Raise `TargetError` for a result that is none of success."""
        if result:
            name = self.library.hipGetErrorName(result)
            hint = "use a smaller --ctx" if result == _OUT_OF_MEMORY else "see `dflashc targets`"
            reason = name.decode() if name else f"error {result}"
            raise TargetError(f"HIP: {function} failed: {reason}: {hint}")

    def get(self, function: str, *arguments: Any, of: Any = ctypes.c_void_p) -> Any:
        """Call a function whose first parameter is where it puts its result."""
        result = of()
        self.call(function, ctypes.byref(result), *arguments)
        return result.value or 0


def load_library() -> Any:
    """The HIP runtime. Raises `TargetError` where there is none."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise TargetError("the HIP runtime libamdhip64.so was not found: install ROCm (https://rocm.docs.amd.com)")


class HipApi:
    """See `streams.StreamApi`."""

    def __init__(self, hip: Hip, number: int) -> None:
        self._call, self._get = hip.call, hip.get
        self._hip = hip
        self._number = number
        self.info = _describe(hip, number)

    def activate(self) -> None:
        self._call("hipSetDevice", self._number)

    def free_memory(self) -> int:
        total = ctypes.c_size_t()
        return int(self._get("hipMemGetInfo", ctypes.byref(total), of=ctypes.c_size_t))

    def allocate(self, nbytes: int) -> int:
        return int(self._get("hipMalloc", nbytes))

    def free(self, address: int) -> None:
        self._call("hipFree", address)

    def allocate_host(self, nbytes: int) -> tuple[int, int]:
        host = int(self._get("hipHostMalloc", nbytes, _HOST_MAPPED))
        try:
            return host, int(self._get("hipHostGetDevicePointer", host, 0))
        except TargetError:
            self.free_host(host)
            raise

    def free_host(self, address: int) -> None:
        self._call("hipHostFree", address)

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        self._call("hipMemsetD8Async", address, 0, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("hipMemcpyAsync", target, source, nbytes, _BY_ADDRESS, stream)

    def create_stream(self) -> int:
        return int(self._get("hipStreamCreateWithFlags", _NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._call("hipStreamDestroy", stream)

    def is_done(self, stream: int) -> bool:
        result = self._hip.library.hipStreamQuery(stream)
        if result == _NOT_READY:
            return False
        self._hip.check("hipStreamQuery", result)
        return True

    def load(self, code: bytes) -> int:
        return int(self._get("hipModuleLoadData", code))

    def unload(self, module: int) -> None:
        self._call("hipModuleUnload", module)

    def function(self, module: int, symbol: str) -> int:
        return int(self._get("hipModuleGetFunction", module, symbol.encode()))

    def launch(self, function: int, groups: int, threads: tuple[int, int, int], parameters: int, stream: int) -> None:
        self._call("hipModuleLaunchKernel", function, groups, 1, 1, *threads, 0, stream, parameters, None)

    def begin_capture(self, stream: int) -> None:
        self._call("hipStreamBeginCapture", stream, _CAPTURE_OF_THIS_THREAD)

    def end_capture(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        self._call("hipStreamEndCapture", stream, ctypes.byref(graph))
        return graph.value or 0

    def instantiate(self, graph: int) -> int:
        return int(self._get("hipGraphInstantiate", graph, None, None, 0))

    def destroy_graph(self, graph: int) -> None:
        self._call("hipGraphDestroy", graph)

    def launch_graph(self, executable: int, stream: int) -> None:
        self._call("hipGraphLaunch", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        self._call("hipGraphExecDestroy", executable)

    def create_event(self) -> int:
        return int(self._get("hipEventCreate"))

    def destroy_event(self, event: int) -> None:
        self._call("hipEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("hipEventRecord", event, stream)

    def seconds_between(self, first: int, last: int) -> float:
        return float(self._get("hipEventElapsedTime", first, last, of=ctypes.c_float)) * 1e-3

    def close(self) -> None:
        """HIP's context of a device goes with the process."""


def _describe(hip: Hip, number: int) -> GpuInfo:
    name = ctypes.create_string_buffer(256)
    hip.call("hipDeviceGetName", ctypes.addressof(name), len(name), number)
    # The layout of this structure differs from version to version; only the architecture is of interest.
    properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
    hip.call("hipGetDevicePropertiesR0600", ctypes.addressof(properties), number)
    found = re.search(rb"gfx[0-9a-f]+", properties.raw[len(name) :])
    memory = int(hip.get("hipDeviceTotalMem", number, of=ctypes.c_size_t))
    release, version = divmod(int(hip.get("hipRuntimeGetVersion", of=ctypes.c_int)) // 10**5, 100)
    integrated = hip.get("hipDeviceGetAttribute", _INTEGRATED, number, of=ctypes.c_int)
    # The same on every GPU that HIP knows.
    limits = Limits(groups=(1 << 31) - 1, threads=(1024, 1024, 1024), threads_in_all=1024, shared=64 << 10,
                    buffers=1 << 10, binding=min(memory, MOST_BINDING), allocation=memory)
    return GpuInfo(name.value.decode(errors="replace"), "integrated" if integrated else "discrete",
                   f"HIP {release}.{version}", found[0].decode() if found else "", memory, limits,
                   _runtimes_up_to(release, version), "" if found else "does not tell its architecture")


def _runtimes_up_to(release: int, version: int) -> frozenset[str]:
    """The runtimes that this one stands for where an artefact requires one, or a later one: "HIP 7.2" and before."""
    return frozenset(f"HIP {r}.{v}" for r in range(release + 1) for v in range(10) if (r, v) <= (release, version))
