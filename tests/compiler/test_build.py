"""Builds whose files change under them: one line, and nothing half-written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashc.compiler.build import BuildOptions, Silent, build
from dflashc.runtime.errors import GgufError
from dflashc.targets.cpu.target import CpuTarget


class Doing(Silent):
    """Progress that does something when a stage begins."""

    def __init__(self, stage: str, action: Callable[[], object]) -> None:
        self._stage, self._action = stage, action

    def start(self, stage: str, total: int) -> None:
        if stage == self._stage:
            self._action()


@pytest.mark.parametrize(("stage", "action", "message"), [
    ("weights", lambda path: os.truncate(path, 1 << 20), "was cut short while it was read"),
    ("hashing", lambda path: os.utime(path, (0, 0)), "was changed while it was read"),
])
def test_a_model_that_changes_during_the_build(stage: str, action: Callable[[Path], object], message: str,
                                               pycode_model: Path, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernels(target: CpuTarget, requests: Any, output: Path, progress: Any) -> None:
        output.touch()

    monkeypatch.setattr(CpuTarget, "compile", no_kernels)
    model = Path(shutil.copy(pycode_model, tmp_path / "model.gguf"))
    with pytest.raises(GgufError, match=message):
        build(BuildOptions(model, "cpu", tmp_path / "out", context=256), Doing(stage, lambda: action(model)))
    assert list(tmp_path.iterdir()) == [model]
