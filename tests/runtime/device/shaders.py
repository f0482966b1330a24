"""The tiny kernels for Vulkan, compiled where the machine has a compiler; and what a test of Vulkan needs."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dflashc.runtime.device import vulkan
from dflashc.runtime.device.vulkan.api import load_api
from dflashc.runtime.errors import TargetError
from tests.runtime.device.tiny import GROUP

_HEAD = f"#version 450\nlayout(local_size_x = {GROUP}) in;\n"


def _buffer(binding: int, name: str) -> str:
    return f"layout(std430, set = 0, binding = {binding}) buffer B{binding} {{ float {name}[]; }};\n"


def _scalars(members: str) -> str:
    return f"layout(push_constant) uniform P {{ {members} }} p;\n"


def _main(body: str) -> str:
    return f"void main() {{ uint i = gl_GlobalInvocationID.x; if (i < uint(p.count)) {body} }}\n"


SOURCES = {
    "scale": _HEAD + _buffer(0, "x") + _buffer(1, "y") + _scalars("float factor; int count;")
    + _main("y[i] = x[i] * p.factor;"),
    "add": _HEAD + _buffer(0, "w") + _buffer(1, "y") + _scalars("int count;") + _main("y[i] += w[i];"),
    "copy": _HEAD + _buffer(0, "y") + _buffer(1, "emitted") + _scalars("int count;") + _main("emitted[i] = y[i];"),
}


@cache
def spirv(symbol: str) -> bytes:
    """A tiny kernel's code."""
    return compile_glsl(SOURCES[symbol])


def compile_glsl(source: str) -> bytes:
    with TemporaryDirectory() as folder:
        text, code = Path(folder, "kernel.comp"), Path(folder, "kernel.spv")
        text.write_text(source)
        done = subprocess.run(["glslangValidator", "-V", "--target-env", "vulkan1.2", "-o", code, text],
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return code.read_bytes()


@cache
def _missing() -> str:
    if shutil.which("glslangValidator") is None:
        return "glslangValidator is missing (Debian: glslang-tools)"
    try:
        load_api()
        return "" if vulkan.find_gpus() else "no Vulkan device"
    except TargetError as error:
        return str(error)


def require_vulkan() -> None:
    """Skip the test where Vulkan kernels cannot be compiled or run."""
    if _missing():
        pytest.skip(_missing())
