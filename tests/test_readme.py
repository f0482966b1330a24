"""The commands of the README do what it says they do: they run, in order, on the models that are shipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands(text: str) -> list[str]:
    """Commands of the console blocks of a Markdown text: lines after a "$ ", or all lines of a block without one."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        lines = block.replace("\\\n", "").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found += prompted or lines
    return found


def test_commands_are_told_from_output_and_other_blocks() -> None:
    text = ("```console\n$ dflashc a \\\n  b\ndflashc output\n$ make\n```\n"
            "```python\ndflashc()\n```\n```console\ndflashc c\n```\n")
    assert commands(text) == ["dflashc a   b", "make", "dflashc c"]


def test_the_quick_start_has_commands() -> None:
    assert any(command.startswith("dflashc ") for command in commands(README))


@pytest.mark.slow
def test_commands_run(tmp_path: Path) -> None:
    """`make` is for CI; what is built by one command is there for the next."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    program = tmp_path / "bin" / "dflashc"
    program.parent.mkdir()
    # guarded, for a build's worker processes import the program
    program.write_text(f"#!{sys.executable}\nfrom dflashc.compiler.cli import main\n\n"
                       'if __name__ == "__main__":\n    main()\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}",
                   "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for command in commands(README):
        if command.startswith("dflashc "):
            done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=600, check=False)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
