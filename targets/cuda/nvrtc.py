"""NVRTC: CUDA C++ to a cubin and PTX, without a GPU and without a CUDA toolkit. Knows nothing of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflashc.runtime.errors import TargetError

_OPTIONS = (
    "-default-device",
    "-std=c++17",
    # a * b + c is rounded twice, as written; what shall be fused is an explicit fma. A row's result would otherwise
    # depend on how many rows the compiler sees beside it.
    "-fmad=false",
)


@dataclass(frozen=True)
class Compiled:
    """A translation unit for one architecture, and the same for later ones."""

    cubin: bytes
    ptx: bytes


def missing() -> list[str]:
    """What a build for CUDA lacks on this machine, and how to get it; one line each."""
    try:
        version()
    except TargetError as error:
        return [str(error)]
    return []


def version() -> tuple[int, int]:
    """NVRTC's version. Raises `TargetError` where it cannot be loaded."""
    major, minor = _call("nvrtcVersion")
    return int(major), int(minor)


def compile_source(source: str, arch: str) -> Compiled:
    """Compile for a real architecture such as "sm_89". Raises `TargetError` with the compiler's first error."""
    (program,) = _call("nvrtcCreateProgram", source.encode(), b"kernels.cu", 0, None, None)
    try:
        options = [o.encode() for o in (f"--gpu-architecture={arch}", *_OPTIONS)]
        try:
            _call("nvrtcCompileProgram", program, len(options), options)
        except TargetError as error:
            log = _read(program, "Log").rstrip(b"\0").decode(errors="replace")
            lines = [x for x in log.splitlines() if "error" in x] or log.splitlines() or [str(error)]
            raise TargetError(f"NVRTC refused the kernels for {arch}: {lines[0].strip()}") from error
        return Compiled(_read(program, "CUBIN", "CUBIN"), _read(program, "PTX", "PTX"))
    finally:
        _call("nvrtcDestroyProgram", program)


def _read(program: Any, what: str, get: str = "ProgramLog") -> bytes:
    """The log, the cubin or the PTX of a program."""
    (size,) = _call("nvrtcGetProgramLogSize" if what == "Log" else f"nvrtcGet{what}Size", program)
    buffer = bytes(size)
    _call(f"nvrtcGet{get}", program, buffer)
    return buffer


def _call(function: str, *arguments: Any) -> tuple[Any, ...]:
    """Call NVRTC; its results without the status. Raises `TargetError` for any but success, and without the library."""
    try:
        from cuda.bindings import nvrtc

        status, *results = getattr(nvrtc, function)(*arguments)
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise TargetError(f"NVRTC, which pip install 'dflashc[cuda]' brings ({reason})") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TargetError(f"{function} failed: {status.name}")
    return tuple(results)
