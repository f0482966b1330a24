"""K and V caches of a target and its drafter: the types a build is asked for, windows, and the memory that it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflashc.recipes.drafter import DrafterShape, drafter_body, write_drafter
from dflashc.recipes.target import TargetShape, write_target
from dflashc.recipes.tensors import Formats
from tests.compiler.command import Here

BYTES = {"f16": 128, "q8_0": 68}
"""Of a key of 64 elements: float16, or two blocks of 32 codes and a float16 scale."""


@pytest.fixture
def dflashc(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)


@pytest.mark.parametrize("kv_type", BYTES)
@pytest.mark.parametrize("drafter_kv_type", BYTES)
def test_each_model_has_a_type_of_its_own(dflashc: Here, pycode_model: Path, pycode_drafter: Path, kv_type: str,
                                          drafter_kv_type: str) -> None:
    """4 and 2 layers with K and V of 2 heads; the target's attention, or the drafter's, reads what was asked for."""
    arguments = ["build", pycode_model, "--drafter", pycode_drafter, "--target", "cpu", "-o", "none", "--ctx", 512,
                 "--kv-type", kv_type, "--drafter-kv-type", drafter_kv_type, "--dry-run"]
    described = json.loads(dflashc(*arguments, "--json").out)
    assert described["kv_types"] == {"target": kv_type, "drafter": drafter_kv_type}
    assert described["memory"]["cache"] == (4 * BYTES[kv_type] + 2 * BYTES[drafter_kv_type]) * 2 * 2 * 512
    assert f"{kv_type} of the target, {drafter_kv_type} of the drafter" in dflashc(*arguments).out


def test_float16_is_what_nobody_asks_for(dflashc: Here, pycode_artefact: Path) -> None:
    assert json.loads(dflashc("inspect", pycode_artefact, "--json").out)["kv_types"] == {"target": "f16"}
    assert "f16 of the target" in dflashc("inspect", pycode_artefact).out


@pytest.mark.parametrize("full_layers", [0, 1])
def test_what_windows_need_does_not_grow_with_the_context(dflashc: Here, full_layers: int, tmp_path: Path) -> None:
    """A target whose sixth layer has no window of 100, and a drafter of two layers with windows of 300 but for some.

    A ring holds what fits the window, with 256 rows behind its first token, in steps of 256.
    """
    target, drafter = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    write_target(target, TargetShape("gemma3", 6, 128, 4, 2, 64, 128, 300, context_length=65536, sliding_window=100),
                 Formats("Q8_0"))
    write_drafter(drafter, target, DrafterShape(drafter_body(target), (0, 4), sliding_window=300,
                                                full_layers=full_layers), Formats("Q8_0"))

    def described(context: int) -> Any:
        arguments = ["build", target, "--drafter", drafter, "--target", "cpu", "-o", "none", "--dry-run", "--json"]
        return json.loads(dflashc(*arguments, "--ctx", context).out)

    token = 2 * 2 * 128
    for context in (1024, 4096, 65536):
        told = described(context)
        assert told["memory"]["cache"] == token * (
            5 * 512 + context + (2 - full_layers) * 768 + full_layers * context)
        assert told["rings"] == [{"model": "target", "window": 100, "slots": 512},
                                 {"model": "drafter", "window": 300, "slots": 768}]
    told = described(512)
    assert told["memory"]["cache"] == token * 8 * 512, "where they save nothing there are none"
    assert told["rings"] == []


def test_refusals(dflashc: Here, pycode_model: Path, tmp_path: Path) -> None:
    output = ["--target", "cpu", "-o", tmp_path / "out", "--json"]
    assert "'q4_0' is not one of 'f16', 'q8_0'" in dflashc.error(2, "build", pycode_model, *output, "--kv-type", "q4_0")
    assert "needs --drafter" in dflashc.error(2, "build", pycode_model, *output, "--drafter-kv-type", "q8_0")
    odd = tmp_path / "odd.gguf"
    write_target(odd, TargetShape("qwen3", 1, 128, 2, 1, 80, 128, 300), Formats("F16"))
    message = dflashc.error(3, "build", odd, *output, "--kv-type", "q8_0")
    assert message == "attention heads of 80 elements found; K/V type q8_0 needs a multiple of 32: use f16"
    assert list(tmp_path.iterdir()) == [odd]
