"""glslang and SPIRV-Tools: where they are, what is missing, and from GLSL to a checked SPIR-V module.

Looked for on PATH first (Debian's glslang-tools and spirv-tools), then in the packages of the extra `vulkan`. Knows
nothing of kernels.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dflashc.runtime.errors import TargetError
from dflashc.targets.vulkan.spirv import with_exact_floats

ENVIRONMENT = "vulkan1.2"
"""What every module is made for and validated against."""

_TOOLS = {"glslangValidator": "glslang-tools", "spirv-opt": "spirv-tools", "spirv-val": "spirv-tools"}
_SECONDS = 120


@dataclass(frozen=True)
class _Tool:
    command: str
    libraries: str = ""

    def run(self, *arguments: str) -> str:
        """Its output; raises `TargetError` with its last line when it fails."""
        environment = dict(os.environ)
        if self.libraries:
            environment["LD_LIBRARY_PATH"] = self.libraries
        try:
            result = subprocess.run([self.command, *arguments], capture_output=True, text=True, check=False,
                                    timeout=_SECONDS, env=environment)
        except subprocess.TimeoutExpired as error:
            raise TargetError(f"{self.command} did not finish in {_SECONDS} seconds") from error
        if result.returncode != 0:
            lines = (result.stdout + result.stderr).splitlines() or ["no message"]
            first = next((x for x in lines if "error:" in x.lower() and "No code generated" not in x), lines[0])
            raise TargetError(f"{Path(self.command).name} failed: {first.strip()}")
        return result.stdout


def missing() -> list[str]:
    """What a build for Vulkan lacks on this machine, and how to get it; one line each."""
    packages = sorted({package for name, package in _TOOLS.items() if _find(name) is None})
    return [f"{' and '.join(n for n, p in _TOOLS.items() if p == package)} (Debian: apt install {package}; "
            "or pip install 'dflashc[vulkan]')" for package in packages]


def compile_shader(source: str, folder: Path, name: str) -> bytes:
    """The optimised and validated SPIR-V of a GLSL compute shader; intermediate files go to `folder`.

    Raises `TargetError` with the first message of the tool that refused it.
    """
    shader, module, final = (folder / f"{name}{suffix}" for suffix in (".comp", ".spv", ".opt.spv"))
    shader.write_text(source)
    tool("glslangValidator").run("-V", "--target-env", ENVIRONMENT, "-S", "comp", "-o", str(module), str(shader))
    module.write_bytes(with_exact_floats(module.read_bytes()))
    tool("spirv-opt").run("-O", str(module), "-o", str(final))
    tool("spirv-val").run("--target-env", ENVIRONMENT, str(final))
    return final.read_bytes()


def tool(name: str) -> _Tool:
    """A tool by name. Raises `TargetError` when this machine does not have it."""
    found = _find(name)
    if found is None:
        raise TargetError(f"{name} not found; install it (Debian: apt install {_TOOLS[name]}; or pip install "
                          "'dflashc[vulkan]')")
    return found


@cache
def _find(name: str) -> _Tool | None:
    if path := shutil.which(name):
        return _Tool(path)
    specification = importlib.util.find_spec("cmeel")
    for site in {Path(p).parent for p in (specification.submodule_search_locations or [])} if specification else ():
        for prefix in site.glob("cmeel.prefix"):
            if (prefix / "bin" / name).is_file():
                return _Tool(str(prefix / "bin" / name), str(prefix / "lib"))
    return None
