"""The pairs that these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.rounds.building import Workshop
from tests.rounds.files import counting_pairs, pycode_pairs, random_pairs


@pytest.fixture(scope="session")
def workshop(pycode_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("rounds")
    files = pycode_pairs(pycode_model.parent, "q8_0") | counting_pairs(folder, "Q8_0") | random_pairs(folder, "Q8_0")
    with closing(Workshop(files, folder)) as workshop:
        yield workshop


@pytest.fixture(scope="session")
def float16_workshop(pycode_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """The shipped pairs in F16."""
    files = pycode_pairs(pycode_model.parent, "f16")
    with closing(Workshop(files, tmp_path_factory.mktemp("rounds-f16"))) as workshop:
        yield workshop


@pytest.fixture(scope="session")
def float32_workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """The made pairs in F32."""
    folder = tmp_path_factory.mktemp("rounds-f32")
    with closing(Workshop(counting_pairs(folder, "F32") | random_pairs(folder, "F32"), folder)) as workshop:
        yield workshop
