"""GPUs are looked for without trust: what a driver may do when it is asked, and what is then said."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from dflashc.runtime.device import survey as module
from dflashc.runtime.device import vulkan
from dflashc.runtime.device.opening import GPU_MODULES
from dflashc.runtime.device.survey import describe, survey
from tests.runtime.device.shaders import require_vulkan
from tests.runtime.device.test_opening import GPUS


def answering(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Let a shell script answer for every driver."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(program))


@pytest.mark.parametrize(("script", "missing"), [
    ("sleep 60", "the driver did not answer within 0 s"),
    ("kill -SEGV $$", "the driver crashed (exit code -11)"),
    ("exit 3", "the driver crashed (exit code 3)"),
    ("echo '{}'", "the driver crashed (exit code 0)"),
    ("echo hello; echo nonsense", "the driver crashed (exit code 0)"),
])
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str,
                                       missing: str) -> None:
    answering(monkeypatch, tmp_path, script)
    started = time.monotonic()
    assert [(s.machine, s.gpus, s.missing) for s in survey(0.4 if "sleep" in script else 30)] == [
        (machine, (), missing) for machine in GPU_MODULES]
    assert time.monotonic() - started < 20


def test_an_answer_comes_as_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vulkan, "find_gpus", lambda: GPUS)
    (tmp_path / "answer").write_text("a driver's greeting\n" + json.dumps(describe("vulkan")) + "\n")
    answering(monkeypatch, tmp_path, f"cat {tmp_path}/answer")
    assert all(list(s.gpus) == GPUS and not s.missing for s in survey())


def test_this_machine_is_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    require_vulkan()
    found = {s.machine: s for s in survey()}
    assert list(found) == list(GPU_MODULES)
    assert list(found["vulkan"].gpus) == vulkan.find_gpus()
    assert all(bool(s.gpus) != bool(s.missing) for s in found.values())


def test_no_gpu_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan, "find_gpus", list)
    assert describe("vulkan") == {"gpus": [], "missing": "the driver shows no GPU"}
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "cuda-bindings" in describe("cuda")["missing"]
