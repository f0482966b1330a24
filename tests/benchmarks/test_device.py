"""The benchmark of devices on the small pair, run on the CPU: that it measures what it says, never how fast it was."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks import device
from benchmarks.kernels import KernelTime
from dflashc.runtime.measuring import PARTS, Costs


def test_small_pair(pycode_pair_artefact: Path, tmp_path: Path) -> None:
    output = tmp_path / "device.json"
    arguments = [str(pycode_pair_artefact), "--threads", "1", "--depths", "0,64,1000000", "--seconds", "0.01", "--json",
                 str(output)]
    ran = CliRunner().invoke(device.main, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    for expected in ("Rounds at depth 64", "Kernels of a plain step", "Kernels of a round of width 15", "self-test",
                     "Kernels of a prefill of 256 tokens"):
        assert expected in ran.output
    found = json.loads(output.read_text())
    assert found["costs"]["depths"] == [0, 64]  # no session has room for the third
    assert all(len(widths) == 16 for part in PARTS for widths in found["costs"]["parts"][part])
    assert {t["part"] for t in found["prefill"]} == {"decode", "ids"}
    assert {t["part"] for t in found["kernels"]["0"]} == {"positions", "decode", "ids", "inject", "accept"}


def test_errors_are_one_line(pycode_pair_artefact: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments, expected in (([str(tmp_path)], "is not an artefact"),
                                ([str(pycode_pair_artefact), "--device", "0"], "are for GPUs"),
                                ([str(pycode_pair_artefact), "--depths", "x"], "numbers with commas")):
        ran = runner.invoke(device.main, arguments, catch_exceptions=False)
        assert ran.exit_code
        assert expected in ran.output.replace("\n", " ")


def test_bars() -> None:
    """A large matmul at 800 of 1000 bytes a second, a small one that does not count, a round of 1.5 steps."""
    large, small = 1 << 30, 1 << 10
    rounds = ((2.0, *[3.0] * 7),)
    times = [KernelTime("decode", "matmul", 2, 2 * large / 800, 2 * large, 0),
             KernelTime("decode", "other", 1, 1.0, small, 0)]
    found = {"costs": Costs((0,), {"rounds": rounds}, 1.0), "kernels": {0: times}, "bandwidth": 1000.0}
    share, steps = device.bars(found)
    assert (share.found, share.reached) == (0.8, False)
    assert (steps.found, steps.reached) == (1.5, False)
