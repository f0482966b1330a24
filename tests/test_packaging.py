"""What is installed: every package is listed, and a wheel holds the data that they read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
"""Folder of every top-level package."""


def data_files() -> set[str]:
    """What packages hold beside Python, by its path in a wheel."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                found.add(f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}")
    return found


def test_every_package_is_listed() -> None:
    found = {".".join([package, *path.parent.relative_to(ROOT / folder).parts])
             for package, folder in FOLDERS.items() for path in (ROOT / folder).rglob("__init__.py")}
    assert sorted(found) == sorted(SETUPTOOLS["packages"])


def test_the_data_that_a_wheel_must_hold_is_there() -> None:
    assert data_files() >= {"dflashc/targets/cpu/executor.ll", "dflashc/runtime/prompts/code.json",
                            "dflashc/recipes/pycode-3m/pycode-3m-q8_0.gguf",
                            "dflashc/recipes/pycode-3m/pycode-3m-dflash-q8_0.gguf"}


@pytest.mark.slow
def test_a_wheel_holds_all_modules_and_data(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="needs the setuptools that pyproject.toml asks for")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                    "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("dflashc-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
               for package, folder in FOLDERS.items() for path in (ROOT / folder).rglob("*.py")}
    assert held >= modules | data_files()
