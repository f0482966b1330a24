"""Self-tests taken over from another artefact: what is refused, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflashc.compiler.artefact import write_manifest
from dflashc.compiler.self_test import read_other, taken_over
from dflashc.runtime.errors import ArtefactError, BuildError
from dflashc.runtime.manifest import Manifest, load_manifest
from dflashc.targets.registry import find_target


@pytest.fixture
def other(pycode_artefact: Path) -> Manifest:
    return load_manifest(pycode_artefact)


def test_prompts_that_fit_are_kept(pycode_artefact: Path, other: Manifest) -> None:
    need = find_target("vulkan").requirements()
    assert read_other(pycode_artefact, need, "f16") == other
    ours = replace(other, target="vulkan", requirements=need, self_test=())
    assert taken_over(other, ours) == other.self_test
    short = taken_over(other, replace(ours, context=64))
    assert [len(t.prompt) for t in short] == [1, 23]


def test_a_cpu_records_its_own(pycode_artefact: Path, other: Manifest) -> None:
    with pytest.raises(BuildError, match="--self-test-of is for GPUs"):
        read_other(pycode_artefact, other.requirements, "f16")


def test_artefacts_that_cannot_serve_are_refused(pycode_artefact: Path, other: Manifest, tmp_path: Path) -> None:
    need = find_target("vulkan").requirements()
    with pytest.raises(ArtefactError, match="is not an artefact"):
        read_other(tmp_path, need, "f16")
    with pytest.raises(BuildError, match="has K and V caches of f16, this build of q8_0: build"):
        read_other(pycode_artefact, need, "q8_0")
    write_manifest(tmp_path, replace(other, self_test=()))
    with pytest.raises(BuildError, match="has no recorded self-test"):
        read_other(tmp_path, need, "f16")


def test_another_model_is_refused(other: Manifest) -> None:
    sources = (replace(other.sources[0], sha256={"other.gguf": "0" * 64}),)
    with pytest.raises(BuildError, match=r"another model \(pycode-3m-q8_0\.gguf\) than this one \(other\.gguf\)"):
        taken_over(other, replace(other, sources=sources))
