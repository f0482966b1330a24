"""`fake_gpu` under the names of `cuda.bindings.driver`: every function returns a result and then its values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.runtime.device.fake_gpu import NOT_READY, FakeGpu

NEGLIGIBLE = frozenset({
    "cuCtxSetCurrent", "cuStreamQuery", "cuGraphExecDestroy", "cuMemFree", "cuMemFreeHost", "cuEventDestroy",
    "cuModuleUnload", "cuStreamDestroy", "cuDevicePrimaryCtxRelease"})
"""Calls of which the last are made when the device is closed; where those fail there is nothing to be done."""


class _Named:
    """Enumeration members that are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeCuda:
    """The module. `gpu` is None where there is no driver."""

    CUdevice_attribute = _Named()
    CUstreamCaptureMode = _Named()

    def __init__(self, gpu: FakeGpu | None) -> None:
        self.gpu = gpu

    def cuGetErrorName(self, result: int) -> tuple[int, bytes]:
        return 0, {2: b"CUDA_ERROR_OUT_OF_MEMORY", 999: b"CUDA_ERROR_UNKNOWN"}[result]

    def cuStreamQuery(self, stream: int) -> tuple[int]:
        gpu = self._gpu()
        return (gpu.fails("cuStreamQuery") or (0 if gpu.is_done(stream) else NOT_READY),)

    def functions(self) -> dict[str, Any]:
        """What each function does, by name."""
        gpu = self._gpu()
        return {
            "cuInit": lambda flags: None,
            "cuDeviceGetCount": lambda: 1,
            "cuDeviceGet": lambda number: number,
            "cuDeviceGetName": lambda length, device: b"Fake GPU\0\0\0",
            "cuDeviceTotalMem": lambda device: gpu.total,
            "cuDriverGetVersion": lambda: 13020,
            "cuDeviceGetAttribute": self._attribute,
            "cuDevicePrimaryCtxRetain": lambda device: gpu.make("context"),
            "cuDevicePrimaryCtxRelease": self._release,
            "cuCtxSetCurrent": self._set_current,
            "cuMemGetInfo": lambda: (gpu.free_bytes(), gpu.total),
            "cuMemAlloc": gpu.allocate,
            "cuMemFree": gpu.free,
            "cuMemHostAlloc": lambda nbytes, flags: gpu.allocate(nbytes, host=True),
            "cuMemHostGetDevicePointer": lambda host, flags: gpu.device_address(host),
            "cuMemFreeHost": lambda host: gpu.free(host, host=True),
            "cuMemsetD8Async": lambda address, value, nbytes, stream: gpu.fill(address, nbytes, stream),
            "cuMemcpyAsync": gpu.copy,
            "cuStreamCreate": lambda flags: gpu.make("stream"),
            "cuStreamDestroy": lambda stream: gpu.destroy("stream", stream),
            "cuModuleLoadData": lambda code: gpu.load(code.removeprefix(b"ptx:")),
            "cuModuleUnload": lambda module: gpu.destroy("module", module),
            "cuModuleGetFunction": lambda module, symbol: gpu.function(module, symbol.decode()),
            "cuLaunchKernel": lambda f, gx, gy, gz, x, y, z, shared, stream, parameters, extra:
                gpu.launch(f, (gx, gy, gz), (x, y, z), parameters, stream),
            "cuStreamBeginCapture": lambda stream, mode: gpu.begin_capture(stream),
            "cuStreamEndCapture": lambda stream: gpu.end_capture(),
            "cuGraphInstantiate": lambda graph, flags: gpu.instantiate(graph),
            "cuGraphDestroy": lambda graph: gpu.destroy("graph", graph),
            "cuGraphLaunch": gpu.launch_graph,
            "cuGraphExecDestroy": lambda executable: gpu.destroy("executable", executable),
            "cuEventCreate": lambda flags: gpu.make("event"),
            "cuEventDestroy": lambda event: gpu.destroy("event", event),
            "cuEventRecord": gpu.record_event,
            "cuEventElapsedTime": gpu.milliseconds,
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        gpu, function = self._gpu(), self.functions()[name]

        def called(*arguments: Any) -> tuple[Any, ...]:
            result = gpu.fails(name)
            if result and "Destroy" not in name and "Free" not in name and name not in (
                    "cuModuleUnload", "cuDevicePrimaryCtxRelease", "cuStreamEndCapture"):
                return (result, None)
            value = function(*arguments)  # what was to be destroyed is gone, whatever is reported
            if result and name == "cuStreamEndCapture":
                gpu.destroy("graph", value)
            return (result, *(value if isinstance(value, tuple) else () if value is None else (value,)))

        return called

    def _gpu(self) -> FakeGpu:
        if self.gpu is None:
            raise RuntimeError("the package finds no libcuda.so.1")
        return self.gpu

    def _attribute(self, name: str, device: int) -> int:
        major, minor = self._gpu().level.removeprefix("sm_")[:-1], self._gpu().level[-1]
        return {"COMPUTE_CAPABILITY_MAJOR": int(major), "COMPUTE_CAPABILITY_MINOR": int(minor), "INTEGRATED": 0,
                "MAX_GRID_DIM_X": (1 << 31) - 1, "MAX_THREADS_PER_BLOCK": 1024, "MAX_BLOCK_DIM_X": 1024,
                "MAX_BLOCK_DIM_Y": 1024, "MAX_BLOCK_DIM_Z": 64, "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10}[
                    name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def _set_current(self, context: int) -> None:
        assert ("context", context) in self._gpu().live

    def _release(self, device: int) -> None:
        (context,) = [c for c in self._gpu().live if c[0] == "context"]
        self._gpu().live.remove(context)


def fake_bindings(gpu: FakeGpu | None) -> dict[str, Any]:
    """What to put into `sys.modules`."""
    driver = FakeCuda(gpu)
    bindings = SimpleNamespace(driver=driver)
    return {"cuda": SimpleNamespace(bindings=bindings), "cuda.bindings": bindings, "cuda.bindings.driver": driver}
