"""Writing artefacts: whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dflashc.compiler.artefact import new_artefact, write_manifest
from dflashc.runtime.errors import BuildError
from dflashc.runtime.manifest import Manifest, Requirements, Source, load_manifest

MANIFEST = Manifest(
    dflashc="1", target="cpu", requirements=Requirements("x86_64", "x", ("f",), 1),
    sources=(Source("m", "a", {}, 1),), config={"vocabulary": 3}, drafter={}, kv_types={}, context=256, weights=(),
    self_test=(), notes=("a note",))


def write(output: Path, content: str = "data") -> None:
    with new_artefact(output) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(content)
        write_manifest(folder, MANIFEST)


def fail(output: Path, error: type[BaseException]) -> None:
    with new_artefact(output) as folder:
        (folder / "half").write_text("half")
        raise error


def test_a_whole_artefact_takes_its_name_and_lists_its_files(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    document = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert document["files"] == {"sub/file": {"bytes": 4, "sha256": hashlib.sha256(b"data").hexdigest()}}
    assert load_manifest(tmp_path / "out").notes == ("a note",)


def test_an_artefact_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "out")
    write(tmp_path / "out", "other")
    assert (tmp_path / "out" / "sub" / "file").read_text() == "other"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    write(tmp_path / "out")
    with pytest.raises(error):
        fail(tmp_path / "out", error)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "sub" / "file").read_text() == "data"


def test_what_is_no_artefact_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BuildError, match="exists and is not an artefact"):
        write(tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BuildError, match="exists and is not an artefact"):
        write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_in_no_directory(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"none does not exist; create it first"):
        write(tmp_path / "none" / "out")


def test_an_output_that_cannot_be_written() -> None:
    with pytest.raises(BuildError, match="cannot write into /proc"):
        write(Path("/proc/out"))
