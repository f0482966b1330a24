"""The small example model in its other quantisations, built once for all proofs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.running import build_artefact


@pytest.fixture(scope="session")
def pycode_f16_artefact(pycode_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = pycode_model.with_name("pycode-3m-f16.gguf")
    return build_artefact(model, tmp_path_factory.mktemp("pycode-f16"))


@pytest.fixture(scope="session")
def pycode_q4_k_m_artefact(pycode_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = pycode_model.with_name("pycode-3m-q4_k_m.gguf")
    return build_artefact(model, tmp_path_factory.mktemp("pycode-q4_k_m"))
