"""`fake_gpu` under the names of `libamdhip64.so`: results are returned, values are put where a pointer says."""

from __future__ import annotations

import ctypes
from typing import Any

from dflashc.runtime.device.hip import SIGNATURES
from tests.runtime.device.fake_gpu import NOT_READY, FakeGpu

NEGLIGIBLE = frozenset({
    "hipSetDevice", "hipStreamQuery", "hipGraphExecDestroy", "hipFree", "hipHostFree", "hipEventDestroy",
    "hipModuleUnload", "hipStreamDestroy"})
"""Calls of which the last are made when the device is closed; where those fail there is nothing to be done."""

_ARCHITECTURE_AT = 1000  # bytes into the properties; it is elsewhere in every version


class FakeHip:
    """The library."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "hipGetErrorName":
            return _Function(lambda result: {2: b"hipErrorOutOfMemory", 999: b"hipErrorUnknown"}[result])
        if name not in SIGNATURES:
            raise AttributeError(name)
        return self._functions.setdefault(name, _Function(lambda *arguments: self._call(name, arguments)))

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        gpu = self._gpu
        assert len(arguments) == len(self._functions[name].argtypes)
        result = gpu.fails(name)
        if name == "hipStreamQuery":
            return result or (0 if gpu.is_done(arguments[0]) else NOT_READY)
        ends = "Destroy" in name or "Free" in name or name in ("hipModuleUnload", "hipStreamEndCapture")
        if result and not ends:
            return result
        places = [i for i, kind in enumerate(SIGNATURES[name]) if kind == "o"]
        values = self._do(name, [a for i, a in enumerate(arguments) if i not in places])
        if result and name == "hipStreamEndCapture":
            gpu.destroy("graph", values)
        for place, value in zip(places, values if isinstance(values, tuple) else (values,), strict=False):
            arguments[place]._obj.value = value
        return result

    def _do(self, name: str, a: list[Any]) -> Any:
        gpu = self._gpu
        functions = {
            "hipInit": lambda: None,
            "hipGetDeviceCount": lambda: 1,
            "hipSetDevice": lambda: None,
            "hipDeviceGetName": lambda: ctypes.memmove(a[0], b"gfx of a name\0", 14),
            "hipGetDevicePropertiesR0600": lambda: ctypes.memmove(
                a[0] + _ARCHITECTURE_AT, gpu.level.encode() + b":sramecc-\0", len(gpu.level) + 10),
            "hipDeviceGetAttribute": lambda: 1,
            "hipDeviceTotalMem": lambda: gpu.total,
            "hipRuntimeGetVersion": lambda: 70_200_123,
            "hipMemGetInfo": lambda: (gpu.free_bytes(), gpu.total),
            "hipMalloc": lambda: gpu.allocate(*a),
            "hipFree": lambda: gpu.free(*a),
            "hipHostMalloc": lambda: gpu.allocate(a[0], host=True),
            "hipHostGetDevicePointer": lambda: gpu.device_address(a[0]),
            "hipHostFree": lambda: gpu.free(a[0], host=True),
            "hipMemsetD8Async": lambda: gpu.fill(a[0], a[2], a[3]),
            "hipMemcpyAsync": lambda: gpu.copy(*a[:3], a[4]),
            "hipStreamCreateWithFlags": lambda: gpu.make("stream"),
            "hipStreamDestroy": lambda: gpu.destroy("stream", *a),
            "hipModuleLoadData": lambda: gpu.load(*a),
            "hipModuleUnload": lambda: gpu.destroy("module", *a),
            "hipModuleGetFunction": lambda: gpu.function(a[0], a[1].decode()),
            "hipModuleLaunchKernel": lambda: gpu.launch(a[0], a[1:4], a[4:7], a[9], a[8]),
            "hipStreamBeginCapture": lambda: gpu.begin_capture(a[0]),
            "hipStreamEndCapture": lambda: gpu.end_capture(),
            "hipGraphInstantiate": lambda: gpu.instantiate(a[0]),
            "hipGraphDestroy": lambda: gpu.destroy("graph", *a),
            "hipGraphLaunch": lambda: gpu.launch_graph(*a),
            "hipGraphExecDestroy": lambda: gpu.destroy("executable", *a),
            "hipEventCreate": lambda: gpu.make("event"),
            "hipEventDestroy": lambda: gpu.destroy("event", *a),
            "hipEventRecord": lambda: gpu.record_event(*a),
            "hipEventElapsedTime": lambda: gpu.milliseconds(*a),
        }
        return functions[name]()


class _Function:
    """A function with the attributes that ctypes gives one."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)
