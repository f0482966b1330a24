"""Builds by command: what is printed, and what is left when one is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.compiler.command import COMMAND, Here

pytestmark = pytest.mark.slow


def start(model: Path, output: Path) -> subprocess.Popen[str]:
    """A build in a session of its own, as a shell starts it."""
    return subprocess.Popen([*COMMAND, "build", str(model), "--target", "cpu-x86-64", "-o", str(output)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def members(group: int) -> list[int]:
    """Processes of a process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for(condition, seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "terminal"])
@pytest.mark.parametrize("moment", ["lowering", "compiling"])
def test_an_interrupt_leaves_nothing(pycode_model: Path, tmp_path: Path, whole_group: bool, moment: str) -> None:
    """Ctrl-C on a terminal reaches the workers too, `kill -INT` only the build."""
    process = start(pycode_model, tmp_path / "out")
    assert process.stdout is not None
    process.stdout.readline()  # of the settings
    if moment == "compiling":
        wait_for(lambda: any(tmp_path.glob(".out.*/*/*.o")))
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.strip() == "dflashc: error: interrupted"
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: not members(process.pid), 10)


def test_a_build_says_what_it_made(pycode_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    dflashc = Here(capsys)
    result = dflashc("-v", "build", pycode_model, "--target", "cpu", "-o", output, "--ctx", 300)
    assert result.code == 0, result.err
    assert result.err == "", "no bars where there is no terminal"
    assert "pycode-3m (qwen3), 4 layers, 3.0 MiB" in result.out
    assert "Memory at a context of 512 tokens" in result.out, "whole steps of 256"
    assert result.out.splitlines()[-1].startswith(f"{output}: ")
    again = json.loads(dflashc("build", pycode_model, "--target", "cpu", "-o", output, "--json").out)
    assert again["max_context"] == 4096
    assert again["seconds"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


