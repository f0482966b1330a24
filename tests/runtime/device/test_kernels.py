"""The kernel table: read as it was written, refused whole when anything in it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.kernels import KernelTable, load_kernels, scalar_word
from dflashc.runtime.errors import ArtefactError
from dflashc.runtime.plan import Operand
from tests.runtime.device.tiny import KERNELS, gpu_requirements, write_tiny

CODE = b"12345678"


@pytest.fixture
def artefact(tmp_path: Path) -> Artefact:
    return write_tiny(tmp_path, gpu_requirements("vulkan"), dict.fromkeys(KERNELS, CODE))


def edit(artefact: Artefact, change: Callable[[dict[str, Any]], object]) -> None:
    path = artefact.directory / "kernels.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_table_comes_back_as_it_was(artefact: Artefact) -> None:
    table = load_kernels(artefact)
    assert KernelTable.from_json(json.loads(json.dumps(table.to_json())), table.path) == table
    scale = table.kernel("scale")
    assert (scale.operands, scale.buffers, scale.scalar_bytes) == (("buffer", "f32", "buffer", "i32"), 2, 8)
    assert table.read(table.kernel("copy")) == CODE


def put(value: object, *path: str) -> Callable[[dict[str, Any]], object]:
    def change(document: dict[str, Any]) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(("change", "message"), [
    (put(2, "version"), "version 2 found, 1 expected"),
    (put("cubin", "code"), "holds 'cubin', a vulkan artefact needs spirv"),
    (put([], "kernels"), "damaged"),
    (put(1, "kernels", "scale", "surprise"), "damaged"),
    (put([64, 1], "kernels", "scale", "threads"), "damaged"),
    (put([0, 1, 1], "kernels", "scale", "threads"), "damaged"),
    (put(-1, "kernels", "scale", "offset"), "damaged"),
    (put(True, "kernels", "scale", "shared"), "damaged"),
    (put(["i64"], "kernels", "scale", "operands"), "damaged"),
    (put(["buffer", *["i32"] * 33], "kernels", "scale", "operands"), "132 bytes of scalars"),
    (put(25, "kernels", "scale", "bytes"), "kernel scale reaches past the end"),
    (put(["buffer", "i32", "buffer", "i32"], "kernels", "scale", "operands"), "kernel scale takes"),
    (lambda d: d["kernels"].pop("add"), "lacks kernel add"),
    (lambda d: d.clear(), "damaged"),
])
def test_an_edited_table(artefact: Artefact, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(artefact, change)
    with pytest.raises(ArtefactError, match=message) as error:
        load_kernels(artefact)
    assert "build again" in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_table_that_is_none(artefact: Artefact, text: str) -> None:
    (artefact.directory / "kernels.json").write_text(text)
    with pytest.raises(ArtefactError):
        load_kernels(artefact)


def test_another_calling_version(artefact: Artefact) -> None:
    need = replace(artefact.manifest.requirements, abi=99)
    with pytest.raises(ArtefactError, match="calling version 99, 1 expected"):
        load_kernels(replace(artefact, manifest=replace(artefact.manifest, requirements=need)))


def test_scalars_are_words() -> None:
    assert scalar_word(Operand("context"), 256) == b"\x00\x01\x00\x00"
    assert scalar_word(Operand("i64", "", -2), 256) == b"\xfe\xff\xff\xff"
    assert scalar_word(Operand("f32", "", 1.5), 256) == b"\x00\x00\xc0\x3f"
