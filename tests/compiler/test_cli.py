"""The command line as a user meets it: what is printed where, exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dflashc.compiler.cli_inspect import missing_table
from tests.compiler.command import COMMAND, Here, beside
from tests.gguf.gguf_bytes import F32, STRING, UINT32, entry, gguf_file, string, tensor, uint32


@pytest.fixture
def dflashc(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)


@pytest.fixture
def foreign_model(tmp_path: Path) -> Path:
    """A GGUF file of an unknown architecture with a tensor of an unknown type and a hostile name."""
    path = tmp_path / "foreign.gguf"
    path.write_bytes(gguf_file(
        [entry("general.architecture", STRING, string("hal9000")), entry("general.name", STRING, string("\x1b[2Jx")),
         entry("hal9000.block_count", UINT32, uint32(3))],
        [tensor("known", [4], F32, 0), tensor("unknown", [32], 199, 32)], bytes(4096)))
    return path


def test_without_arguments_the_help_is_shown(dflashc: Here) -> None:
    result = dflashc()
    assert result.code == 0
    assert all(command in result.out for command in (
        "build", "check", "run", "tune", "inspect", "verify", "targets"))


def test_version(dflashc: Here) -> None:
    assert dflashc("--version").out.startswith("dflashc 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["walk"], "No such command"),
        (["build", "x.gguf", "--target", "cpu"], "Missing option '-o'"),
        (["build", "x.gguf", "-o", "out"], "Missing option '--target'"),
        (["build", "x.gguf", "--target", "cpu", "-o", "out", "--fast"], "--fast"),
        (["build", "x.gguf", "--target", "cpu", "-o", "out", "--ctx", "0"], "--ctx"),
        (["run", "x"], "one of -p TEXT, -f FILE and --chat"),
        (["run", "x", "-p", "a", "--chat"], "one of -p TEXT, -f FILE and --chat"),
        (["run", "x", "--chat", "--raw"], "--chat needs the chat template"),
        (["run", "x", "-p", "a", "--temp", "hot"], "--temp"),
        (["run", "x", "-p", "a", "--temp", "-1"], "temperature is -1.0, expected a number from 0"),
        (["run", "x", "-p", "a", "--max-tokens", "0"], "--max-tokens"),
        (["run", "x", "-p", "a", "--width", "wide"], "'wide' is neither a number from 0 nor auto"),
        (["run", "x", "-p", "a", "--width", "-1"], "'-1' is neither a number from 0 nor auto"),
        (["tune", "x", "--seconds", "-1"], "--seconds"),
        (["check", "x.gguf"], "Missing argument 'DRAFTER'"),
        (["run", "x", "-f", "/nowhere/prompt"], "cannot read the prompt /nowhere/prompt: No such file"),
    ],
)
def test_usage_errors(dflashc: Here, arguments: list[str], message: str) -> None:
    assert message in dflashc.error(2, *arguments)


def test_debug_shows_the_traceback(dflashc: Here) -> None:
    assert "Traceback" in dflashc("--debug", "verify", "/nowhere").err


# build


def test_dry_run_writes_nothing(dflashc: Here, pycode_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = dflashc("build", pycode_model, "--target", "cpu", "-o", output, "--ctx", 512, "--dry-run")
    assert result.code == 0, result.err
    assert "pycode-3m (qwen3), 4 layers" in result.out
    assert "Memory at a context of 512 tokens" in result.out
    assert "nothing was written" in result.out
    assert not any(tmp_path.iterdir())


def test_dry_run_as_json_and_with_dumps(dflashc: Here, pycode_model: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    result = dflashc("build", pycode_model, "--target", "cpu-x86-64-v3", "-o", tmp_path / "out", "--dry-run", "--json",
                     "--dump", dump)
    described = json.loads(result.out)
    assert described["config"]["layers"] == 4
    assert described["context"] == 4096
    assert described["requirements"]["level"] == "x86-64-v3"
    assert {p["name"] for p in described["programs"]} >= {"decode.1", "decode.16", "ids.1", "logits.1"}
    assert len(list(dump.iterdir())) > 5


def test_dry_run_of_a_pair(dflashc: Here, pycode_model: Path, pycode_drafter: Path, tmp_path: Path) -> None:
    result = dflashc("build", pycode_model, "--drafter", pycode_drafter, "--target", "cpu", "-o", tmp_path / "out",
                     "--ctx", 512, "--dry-run")
    assert result.code == 0, result.err
    assert "16 rows, up to 15 proposals" in result.out
    assert "inject" in result.out
    refused = dflashc("build", pycode_model, "--drafter", pycode_model, "--target", "cpu", "-o", tmp_path / "out")
    assert (refused.code, refused.out) == (3, "")
    refused = dflashc("build", pycode_model, "--target", "cpu", "-o", tmp_path / "out", "--draft-rows", "most")
    assert (refused.code, refused.err) == (2, "dflashc: error: --draft-rows is 'most'; expected short, full\n")


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"--target": "tpu"}, 4, "unknown target 'tpu'; known: cpu"),
        ({"--target": "cpu-z80"}, 4, "unknown target 'cpu-z80'; known: cpu"),
        ({"--ctx": 1 << 22}, 3, "a context of 4194304 tokens was asked for; the model has 4096"),
        ({"model": "/nowhere/m.gguf"}, 3, "/nowhere/m.gguf"),
        ({"-o": "/nowhere/out"}, 3, "/nowhere does not exist"),
        ({"-o": "/proc/out"}, 3, "cannot write into /proc"),
    ],
)
def test_builds_that_are_refused(dflashc: Here, pycode_model: Path, tmp_path: Path, change: dict[str, object],
                                 code: int, message: str) -> None:
    options = {"model": pycode_model, "--target": "cpu", "-o": tmp_path / "out", **change}
    model = options.pop("model")
    result = dflashc("build", model, *(x for option in options.items() for x in option), "--json")
    assert result.code == code, result
    assert message in result.err
    assert not any(tmp_path.iterdir())


def test_an_output_that_is_something_else_is_kept(dflashc: Here, pycode_model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    message = dflashc.error(3, "build", pycode_model, "--target", "cpu", "-o", tmp_path, "--json")
    assert "exists and is not an artefact" in message
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unsupported_architecture(dflashc: Here, foreign_model: Path, tmp_path: Path) -> None:
    message = dflashc.error(3, "build", foreign_model, "--target", "cpu", "-o", tmp_path / "out")
    assert "architecture 'hal9000' is not supported; supported: " in message


@pytest.mark.parametrize("kept", [0, 3, 1000, -1])
def test_a_truncated_model(dflashc: Here, pycode_model: Path, tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(pycode_model.read_bytes()[:kept])
    for command in (["build", cut, "--target", "cpu", "-o", tmp_path / "out"], ["inspect", cut]):
        assert "cut.gguf" in dflashc.error(3, *command)


# inspect


def test_inspect_a_model(dflashc: Here, pycode_model: Path) -> None:
    out = dflashc("inspect", pycode_model).out
    assert "general.architecture" in out
    assert "qwen3" in out
    assert "2,883,584" in out, "elements in Q8_0"


def test_inspect_what_is_not_supported(dflashc: Here, foreign_model: Path) -> None:
    result = dflashc("inspect", foreign_model)
    assert result.code == 0, result.err
    assert "architecture 'hal9000' is not supported" in result.out
    assert "unknown" in result.out
    assert "\x1b" not in result.out, "names cannot steer the terminal"
    described = json.loads(dflashc("inspect", foreign_model, "--json").out)
    assert described["metadata"]["hal9000.block_count"] == 3
    assert [(t["name"], t["type"]) for t in described["tensors"]] == [("known", "F32"), ("unknown", "unknown")]


def test_inspect_lists_tensors(dflashc: Here, pycode_model: Path) -> None:
    out = dflashc("inspect", pycode_model, "--tensors").out
    assert "blk.3.ffn_down.weight" in out
    assert "256 x 512" in out


def test_inspect_an_artefact(dflashc: Here, pycode_artefact: Path) -> None:
    described = json.loads(dflashc("inspect", pycode_artefact, "--json", "--ctx", 256).out)
    assert described["sources"][0]["architecture"] == "qwen3"
    assert described["memory"]["cache"] == 4 * 2 * 2 * 64 * 2 * 256, "layers, K and V, heads, head size, f16, tokens"
    assert described["bytes"] == sum(p.stat().st_size for p in pycode_artefact.rglob("*")
                                     if p.is_file() and p.name != "manifest.json")
    assert "Memory at a context of 1024 tokens" in dflashc("inspect", pycode_artefact).out
    assert "a context of 2048 tokens" in dflashc.error(2, "inspect", pycode_artefact, "--ctx", 2048)


def test_inspect_a_plan(dflashc: Here, pycode_artefact: Path) -> None:
    out = dflashc("inspect", pycode_artefact, "--plan").out
    assert "1-16, 64, 256" in out, "rows of one role"
    launches = json.loads(dflashc("inspect", pycode_artefact, "--plan", "decode.1", "--json").out)
    (down,) = (x for x in launches if x["operation"].startswith("blk.2.ffn_down.weight"))
    assert down["flops"] == 2 * 512 * 256
    assert "no program 'encode.1'" in dflashc.error(2, "inspect", pycode_artefact, "--plan", "encode.1")


def test_inspect_of_other_paths(dflashc: Here, pycode_model: Path, tmp_path: Path) -> None:
    assert "is not an artefact" in dflashc.error(5, "inspect", tmp_path)
    assert "is no artefact" in dflashc.error(2, "inspect", pycode_model, "--plan")


def test_a_reader_that_goes_away_is_no_error(pycode_model: Path) -> None:
    writer = subprocess.Popen([*COMMAND, "inspect", str(pycode_model), "--tensors"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.wait()
    writer.stderr.close()


# verify, targets


def test_verify(dflashc: Here, pycode_artefact: Path) -> None:
    result = dflashc("verify", pycode_artefact)
    assert result.code == 0, result.err
    assert [line.split()[:2] for line in result.out.splitlines()] == [
        ["manifest", "ok:"], ["files", "ok:"], ["machine", "ok:"], ["self-test", "ok:"]]


def test_verify_a_damaged_artefact(dflashc: Here, pycode_artefact: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(pycode_artefact, tmp_path / "copy")
    weights = bytearray((copy / "weights.bin").read_bytes())
    weights[1000] ^= 1
    (copy / "weights.bin").write_bytes(weights)
    result = dflashc("verify", copy)
    assert result.code == 5
    assert "weights.bin does not have the SHA-256" in result.err
    (copy / "weights.bin").unlink()
    assert "weights.bin is missing" in dflashc.error(5, "run", copy, "-p", "x")


def test_targets(dflashc: Here) -> None:
    found = json.loads(dflashc("targets", "--json").out)
    listed = {t["name"]: t for t in found["targets"]}
    assert {"cpu", "cpu-x86-64", "cpu-x86-64-v3"} <= set(listed)
    assert listed["cpu"]["missing_to_run"] == [], "it stands for the best level of this machine"
    assert listed["cpu-x86-64"]["features"] == []
    flags = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")).split()
    assert ("avx2" in listed["cpu-x86-64-v3"]["missing_to_run"]) == ("avx2" not in flags)
    assert {d["machine"] for d in found["devices"]} | set(found["missing"]) == {"vulkan", "cuda", "rocm"}
    printed = dflashc("targets").out
    assert "cpu-x86-64-v3" in printed
    assert all(d["name"] in printed for d in found["devices"])
    assert all(reason in printed for reason in found["missing"].values())


def test_what_targets_miss_is_said_once() -> None:
    def target(name: str, machine: str, *lacks: str, cannot_build: str = "") -> dict[str, object]:
        return {"name": name, "machine": machine, "missing_to_run": list(lacks), "cannot_build": cannot_build}

    table = missing_table([target("cpu-a", "x86_64", "avx2", "fma"), target("cpu-b", "x86_64"),
                           *(target(f"cuda-{n}", "cuda", "no driver", cannot_build="no NVRTC") for n in "123")])
    assert table.rows == [("run", "cpu-a", "this CPU lacks avx2, fma"), ("build", "cuda-1 … cuda-3", "no NVRTC"),
                          ("run", "cuda-1 … cuda-3", "no driver")]


def test_targets_tells_that_the_linker_is_missing(dflashc: Here, monkeypatch: pytest.MonkeyPatch,
                                                  tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no linker found" in dflashc("targets").out


def test_a_build_without_linker(dflashc: Here, pycode_model: Path, monkeypatch: pytest.MonkeyPatch,
                                tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    message = dflashc.error(4, "build", pycode_model, "--target", "cpu", "-o", tmp_path / "out", "--json")
    assert "no linker found" in message


def test_beside_is_the_same_program() -> None:
    assert beside("walk").code == 2
