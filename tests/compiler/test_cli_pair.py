"""`dflashc check`, and what other commands say of drafters and pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiler import pair_files
from tests.compiler.command import Here


@pytest.fixture
def dflashc(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)


def test_a_pair_that_fits(dflashc: Here, pycode_model: Path, pycode_drafter: Path) -> None:
    result = dflashc("check", pycode_model, pycode_drafter)
    assert (result.code, result.err) == (0, "")
    assert "0, 1, 2 (dflash.target_layers counts from 1)" in result.out
    assert "D1 (dflash; llama.cpp)" in result.out
    assert result.out.splitlines()[-1] == "the pair fits"
    described = json.loads(dflashc("check", pycode_model, pycode_drafter, "--json").out)
    assert described["config"]["taps"] == [0, 1, 2]
    assert described["warnings"] == []


def test_overrides_are_told_and_warned_of(dflashc: Here, tmp_path: Path) -> None:
    target = pair_files.target().write(tmp_path / "target.gguf")
    drafter = pair_files.drafter().write(tmp_path / "drafter.gguf")
    options = ["--taps-offset", 0, "--draft-causal", "all", "--draft-rows", "full", "--embedding-scale", 2]
    described = json.loads(dflashc("check", target, drafter, *options, "--json").out)
    stored = described["config"]["provenance"]["stored_taps"]
    assert described["config"]["taps"] == stored, "an offset of 0"
    assert described["config"]["causal_full"]
    assert described["config"]["embedding_scale"] == 2
    assert described["overrides"] == {"taps_offset": 0, "draft_causal": "all", "draft_rows": "full",
                                      "embedding_scale": 2.0}
    assert "draft causal all" in dflashc("check", target, drafter, *options).out


def test_pairs_that_are_refused(dflashc: Here, pycode_model: Path, pycode_drafter: Path) -> None:
    assert "the other way round" in dflashc.error(3, "check", pycode_drafter, pycode_model)
    assert "not a DFlash drafter" in dflashc.error(3, "check", pycode_model, pycode_model, "--json")
    assert "cannot be tapped" in dflashc.error(3, "check", pycode_model, pycode_drafter, "--taps-offset", 0)
    assert "/nowhere" in dflashc.error(3, "check", pycode_model, "/nowhere")
    assert "--draft-causal is 'some'" in dflashc.error(2, "check", pycode_model, pycode_drafter,
                                                       "--draft-causal", "some")


@pytest.mark.parametrize("command", [["check", "{model}", "{drafter}"], ["inspect", "{drafter}"],
                                     ["inspect", "{model}"]])
def test_files_are_told_without_tvm(pycode_model: Path, pycode_drafter: Path, command: list[str]) -> None:
    arguments = [x.format(model=pycode_model, drafter=pycode_drafter) for x in command]
    script = f"""
import sys
from dflashc.compiler.cli import main
try:
    main({arguments!r})
except SystemExit as ended:
    assert ended.code == 0
print("loaded:", "tvm" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "loaded: False"


# inspect


@pytest.mark.parametrize(("version", "dialect"), [(1, "D1"), (2, "D6"), (1, "D7"), (1, "D9")])
def test_inspect_a_drafter(dflashc: Here, tmp_path: Path, version: int, dialect: str) -> None:
    path = pair_files.dialects(version)[dialect].write(tmp_path / "drafter.gguf")
    result = dflashc("inspect", path)
    assert result.code == 0, result.err
    rows = dict(line.strip().split("  ", 1) for line in result.out.splitlines() if "  " in line.strip())
    assert rows["can be built"].strip() == "with its target, as --drafter"
    assert rows["dialect"].strip().startswith(dialect)
    assert rows["version"].strip() == ("DFlash2" if version == 2 else "DFlash")
    assert rows["target layers"].strip().startswith("1, 3 ("), "counted from 0"
    assert rows["block size"].strip() == "8 rows, up to 7 proposals"
    assert rows["windows"].strip() == "32, full"
    assert "the target's" in rows["embedding"]
    described = json.loads(dflashc("inspect", path, "--json").out)
    assert (described["drafter"]["config"]["taps"], described["unsupported"]) == ([1, 3], None)


def test_inspect_a_drafter_that_cannot_be_read(dflashc: Here, tmp_path: Path) -> None:
    content = pair_files.drafter().with_keys({"dflash.target_layers": None})
    result = dflashc("inspect", content.write(tmp_path / "drafter.gguf"))
    assert result.code == 0, result.err
    assert "target layers" in result.out.splitlines()[5], "why it cannot be built"


def test_a_drafter_is_no_model(dflashc: Here, pycode_drafter: Path, tmp_path: Path) -> None:
    message = dflashc.error(3, "build", pycode_drafter, "--target", "cpu", "-o", tmp_path / "out")
    assert message == f"{pycode_drafter} is a drafter; give the model that it was made for, and it as --drafter"


@pytest.mark.slow
def test_inspect_rounds_of_an_artefact(dflashc: Here, pycode_pair_artefact: Path) -> None:
    overview = dflashc("inspect", pycode_pair_artefact, "--plan").out
    assert "1-16, 64, 256" in overview
    assert "Rounds" in overview
    shown = dflashc("inspect", pycode_pair_artefact, "--plan", "round.7", "--ctx", 100).out
    assert "launches per drafter layer" in shown
    assert "with K/V of 100 tokens" in shown
    described = json.loads(dflashc("inspect", pycode_pair_artefact, "--plan", "round.7", "--json").out)
    assert described["depth"] == 1024
    assert "no 'round.16' in the plan" in dflashc.error(2, "inspect", pycode_pair_artefact, "--plan", "round.16")


@pytest.mark.slow
def test_a_build_records_what_was_stated(dflashc: Here, pycode_model: Path, pycode_drafter: Path,
                                         tmp_path: Path) -> None:
    """Whole blocks are drafted where asked, and the text stays that of the target."""
    output = tmp_path / "out"
    built = dflashc("build", pycode_model, "--drafter", pycode_drafter, "--target", "cpu", "-o", output, "--ctx", 512,
                    "--draft-rows", "full", "--embedding-scale", 1, "--json")
    assert built.code == 0, built.err
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["drafter"]["pair"]["overrides"] == {"taps_offset": None, "draft_causal": "auto",
                                                        "draft_rows": "full", "embedding_scale": 1.0}
    assert {p["name"] for p in json.loads(built.out)["programs"] if p["role"] == "draft"} == {"draft.16"}
    options = ["run", output, "--raw", "-p", "def main():\n", "--temp", 0, "--max-tokens", 32, "-q"]
    assert dflashc(*options, "--width", 3).out == dflashc(*options, "--width", 0).out
