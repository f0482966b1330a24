"""Artefacts that are damaged, edited or foreign: each refused in one line, before it computes anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflashc.runtime import selftest
from dflashc.runtime.artefact import load_artefact, verify_hashes
from dflashc.runtime.device.cpu import check_processor
from dflashc.runtime.device.opening import open_device
from dflashc.runtime.errors import ArtefactError
from dflashc.runtime.manifest import SCHEMA, Manifest, load_manifest
from dflashc.runtime.plan import Plan

Document = dict[str, Any]


@pytest.fixture
def copy(pycode_artefact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pycode_artefact, tmp_path / "copy")


def edit(directory: Path, change: Callable[[Document], object]) -> None:
    """Change the manifest in place."""
    path = directory / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_sound_artefact_passes(pycode_artefact: Path) -> None:
    artefact = load_artefact(pycode_artefact)
    verify_hashes(artefact)
    assert run_self_test(pycode_artefact) == "3 prompts continued as recorded"


def run_self_test(directory: Path) -> str:
    artefact = load_artefact(directory)
    with closing(open_device(artefact)) as device:
        return selftest.run(artefact, device)


@pytest.mark.parametrize("name", ["weights.bin", "kernels.so", "plan.json", "tokenizer/vocabulary.json"])
def test_a_flipped_byte_is_found_by_its_hash(copy: Path, name: str) -> None:
    flip_byte(copy / name, (copy / name).stat().st_size // 2)
    with pytest.raises(ArtefactError, match=f"{name} does not have the SHA-256"):
        verify_hashes(load_artefact_again(copy))


def load_artefact_again(directory: Path) -> Any:
    """The artefact, or only its manifest where the damage keeps the plan from loading."""
    try:
        return load_artefact(directory)
    except ArtefactError:
        from dflashc.runtime.artefact import Artefact

        return Artefact(directory, load_manifest(directory), Plan({}, {}, 0))


@pytest.mark.parametrize("name", ["weights.bin", "kernels.so", "plan.json", "tokenizer/tokenizer.json"])
def test_a_truncated_file(copy: Path, name: str) -> None:
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-1])
    with pytest.raises(ArtefactError, match=rf"{name} has [\d,]+ bytes, [\d,]+ expected"):
        load_artefact(copy)


@pytest.mark.parametrize("name", ["weights.bin", "kernels.so", "plan.json", "tokenizer/vocabulary.json"])
def test_a_missing_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ArtefactError, match=f"file {name} is missing"):
        load_artefact(copy)


def test_a_missing_manifest(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    with pytest.raises(ArtefactError, match=r"is not an artefact \(a folder written by `dflashc build`\): it has no"):
        load_artefact(copy)


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtefactError, match=r"file is not an artefact \(.*\): it is a file"):
        load_artefact(tmp_path / "file")
    with pytest.raises(ArtefactError, match=r"none is not an artefact \(.*\): it does not exist"):
        load_artefact(tmp_path / "none")


@pytest.mark.parametrize(("change", "what"), [
    (lambda plan: plan["programs"].pop("accept.1"), "program 'accept.1'"),
    (lambda plan: plan["programs"].pop("positions.256"), "program 'positions.256'"),
    (lambda plan: plan["programs"].pop("draw.1"), "program 'draw.1'"),
    (lambda plan: plan["buffers"].remove(next(b for b in plan["buffers"] if b["name"] == "sampling")),
     "buffer 'sampling'"),
])
def test_a_plan_of_another_version(change: Callable[[Document], object], what: str, copy: Path) -> None:
    """That lacks what a session would ask for; nothing that it has names the missing part any more."""
    plan = plan_of(copy)
    change(plan)
    for program in plan["programs"].values():
        program["launches"] = [x for x in program["launches"] if "sampling" not in str(x)]
    (copy / "plan.json").write_text(json.dumps(plan))
    edit(copy, lambda m: m["files"]["plan.json"].update(bytes=(copy / "plan.json").stat().st_size))
    with pytest.raises(ArtefactError, match=f"the plan has no {what}: another version of dflashc wrote it; build"):
        load_artefact(copy)


@pytest.mark.parametrize(("width", "message"), [
    (1, "the plan has no program 'accept.2'"), (1 << 40, f"gives {1 << 40} for width"), ("x", "gives 'x' for width")])
def test_a_width_that_the_plan_does_not_have(width: object, message: str, copy: Path) -> None:
    edit(copy, put({"width": width}, "drafter"))
    with pytest.raises(ArtefactError, match=message):
        load_artefact(copy)


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1, str(SCHEMA), None])
def test_another_schema(copy: Path, schema: object) -> None:
    edit(copy, lambda m: m.update(schema=schema))
    with pytest.raises(ArtefactError, match=f"schema {schema!r} found, {SCHEMA} expected"):
        load_artefact(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff"])
def test_a_manifest_that_is_no_object(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtefactError):
        load_artefact(copy)


def drop(name: str) -> Callable[[Document], object]:
    return lambda m: m.pop(name)


def put(value: object, *path: str | int) -> Callable[[Document], object]:
    def change(m: Any) -> None:
        for step in path[:-1]:
            m = m[step]
        m[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        drop("weights"),
        drop("context"),
        put(1, "surprise"),
        put(1, "requirements", "surprise"),
        put([], "requirements"),
        put("many", "context"),
        put("x", "weights", 0, "offset"),
        put(1.5, "weights", 0, "bytes"),
        put(-1, "weights", 0, "offset"),
        put(1 << 60, "weights", 0, "bytes"),
        put(5, "weights"),
        put([["x"]], "self_test"),
        put({"prompt": "ab", "expected": [1]}, "self_test", 0),
        put(3, "files"),
        put("big", "files", "weights.bin", "bytes"),
        put({"bytes": 1, "sha256": "0"}, "files", "../outside"),
        put({"bytes": 1, "sha256": "0"}, "files", "/etc/hostname"),
        lambda m: m["files"].pop("plan.json"),
        lambda m: m["weights"].pop(),
        put("x", "config"),
        put({}, "config"),
        put(-1, "config", "vocabulary"),
        put(1 << 40, "config", "vocabulary"),
        put("x", "config", "hidden"),
    ],
)
def test_an_edited_manifest(copy: Path, change: Callable[[Document], object]) -> None:
    edit(copy, change)
    with pytest.raises(ArtefactError):
        load_artefact(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(["avx2", "quantum"], "requirements", "features"), "lacks quantum"),
        (put("riscv64", "requirements", "machine"), "needs a riscv64 CPU"),
    ],
)
def test_a_foreign_machine(copy: Path, change: Callable[[Document], object], message: str) -> None:
    edit(copy, change)
    with pytest.raises(ArtefactError, match=message):
        open_device(load_artefact(copy))


def test_a_machine_that_does_not_tell_its_features(pycode_artefact: Path, tmp_path: Path) -> None:
    manifest = load_manifest(pycode_artefact)
    if manifest.requirements.features:
        with pytest.raises(ArtefactError, match="lacks"):
            check_processor(manifest.requirements, tmp_path / "none")


def test_another_result_of_the_self_test(copy: Path) -> None:
    edit(copy, lambda m: m["self_test"][1]["expected"].__setitem__(3, 0))
    with pytest.raises(ArtefactError, match=r"self-test 2, width 0: tokens"):
        run_self_test(copy)


def test_without_a_recording_sizes_of_programs_are_compared(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(copy, put([], "self_test"))
    assert "continued alike at every width and cut (none was recorded)" in run_self_test(copy)
    monkeypatch.setattr(selftest, "_token_by_token", lambda session, prompt: (0,) * 16)
    with pytest.raises(ArtefactError, match="does not compute the same in programs of other sizes"):
        run_self_test(copy)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("name", "value"), [("prompt", [10**9]), ("prompt", []), ("expected", [10**9] * 16),
                                             ("expected", [1] * 15), ("prompt", [1] * 300)])
def test_a_self_test_that_was_edited_is_refused(copy: Path, name: str, value: list[int], gpu: bool,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    if gpu:
        monkeypatch.setattr(selftest, "GPU_MODULES", {load_manifest(copy).requirements.machine: ""})
    edit(copy, put(value, "self_test", 1, name))
    with pytest.raises(ArtefactError, match="self-test 2 in the manifest is damaged"):
        run_self_test(copy)


def test_what_a_cpu_recorded_for_a_gpu_holds_up_to_near_ties(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "GPU_MODULES", {load_manifest(copy).requirements.machine: ""})
    alike = "3 prompts continued alike at every width and cut, and as recorded on a CPU"
    assert run_self_test(copy) == alike
    edit(copy, lambda m: m["self_test"][1]["expected"].__setitem__(3, 0))
    message = r"self-test 2, token 4: \d+ found, 0 expected, whose logit is [\d.]+ standard deviations lower"
    with pytest.raises(ArtefactError, match=message):
        run_self_test(copy)
    monkeypatch.setattr(selftest, "_NEAR_TIE", 100)
    assert run_self_test(copy) == f"{alike} up to near ties (prompt 2, token 4)"


def test_a_manifest_comes_back_as_it_was(pycode_artefact: Path) -> None:
    manifest = load_manifest(pycode_artefact)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def plan_of(directory: Path) -> Document:
    return json.loads((directory / "plan.json").read_text())


LAUNCHES = ("programs", "decode.1", "launches")


@pytest.mark.parametrize(
    "change",
    [
        put(0, "version"),
        drop("programs"),
        put("x", "max_context"),
        put([], "programs"),
        put([1, 2], *LAUNCHES, 0),
        put([["buffer", "nowhere", 0]], *LAUNCHES, 0, 7),
        put([["buffer", "arena", 1 << 50]], *LAUNCHES, 0, 7),
        put([["buffer", "arena", -1]], *LAUNCHES, 0, 7),
        put(-5, "buffers", 0, "bytes"),
        put("x", "buffers", 0, "bytes"),
    ],
)
def test_a_plan_that_reaches_outside_of_its_memory(pycode_artefact: Path, change: Callable[[Document], object]) -> None:
    document = plan_of(pycode_artefact)
    change(document)
    with pytest.raises(ArtefactError):
        Plan.from_json(document)
