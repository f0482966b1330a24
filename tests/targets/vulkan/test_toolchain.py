"""Where the tools of SPIR-V are looked for, and what is said when they are missing or refuse."""

import sys
from pathlib import Path

import pytest

from dflashc.runtime.errors import TargetError
from dflashc.targets.vulkan import toolchain
from tests.targets.gpu.building import require_toolchain


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No tool on PATH; returns a folder that is looked in for packages."""
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr(toolchain, "_find", toolchain._find.__wrapped__)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [n for n in sys.modules if n.partition(".")[0] == "cmeel"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_missing_tools_are_named_with_how_to_get_them(no_tools: Path) -> None:
    glslang, spirv = toolchain.missing()
    assert "glslangValidator" in glslang
    assert "apt install glslang-tools" in glslang
    assert "spirv-opt and spirv-val" in spirv
    assert "pip install 'dflashc[vulkan]'" in spirv
    with pytest.raises(TargetError, match="spirv-val not found"):
        toolchain.tool("spirv-val")


def test_packages_are_found_with_their_libraries(no_tools: Path) -> None:
    prefix = no_tools / "cmeel.prefix"
    (no_tools / "cmeel").mkdir()
    (no_tools / "cmeel" / "__init__.py").touch()
    (prefix / "bin").mkdir(parents=True)
    for name in ("glslangValidator", "spirv-opt", "spirv-val"):
        (prefix / "bin" / name).write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH"\n')
        (prefix / "bin" / name).chmod(0o755)
    assert toolchain.missing() == []
    assert toolchain.tool("spirv-opt").run().strip() == str(prefix / "lib")


def test_a_refused_shader_is_one_line(tmp_path: Path) -> None:
    require_toolchain("vulkan")
    with pytest.raises(TargetError, match=r"glslangValidator failed: ERROR.*undeclared") as error:
        toolchain.compile_shader("#version 460\nvoid main() { x = 1; }\n", tmp_path, "bad")
    assert "\n" not in str(error.value)
