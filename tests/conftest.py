"""The small example model, and one artefact of it that the whole test run shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference.shared import shared

PYCODE = "pycode-3m-q8_0.gguf"


@pytest.fixture(scope="session")
def pycode_model() -> Path:
    shipped = Path(__file__).parents[1] / "recipes" / "pycode-3m" / PYCODE
    return shipped if shipped.exists() else shared(f"models/{PYCODE}")


@pytest.fixture(scope="session")
def pycode_drafter(pycode_model: Path) -> Path:
    return pycode_model.with_name("pycode-3m-dflash-q8_0.gguf")


@pytest.fixture(scope="session")
def pycode_artefact(pycode_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for the best level of this CPU, with a context of 1024 tokens; not to be changed."""
    from dflashc.compiler.build import BuildOptions, build

    output = tmp_path_factory.mktemp("pycode") / "pycode-3m.dflash"
    build(BuildOptions(pycode_model, "cpu", output, context=1024))
    return output


@pytest.fixture(scope="session")
def pycode_pair_artefact(pycode_model: Path, pycode_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its drafter."""
    from dflashc.compiler.build import BuildOptions, build

    output = tmp_path_factory.mktemp("pycode-pair") / "pycode-3m.dflash"
    build(BuildOptions(pycode_model, "cpu", output, drafter=pycode_drafter, context=1024))
    return output
