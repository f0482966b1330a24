"""The pairs that count, computed by the reference: every acceptance is what their description says."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from dflashc.recipes.counting import (
    PERIOD,
    VOCABULARY,
    proposal_of_the_blind,
    successor,
    write_counting_drafter,
    write_counting_target,
)
from dflashc.recipes.tensors import Formats
from tests.reference.config import read_drafter, read_model
from tests.reference.dflash import ReferenceDrafter, speculate
from tests.reference.functions import F16
from tests.reference.transformer import ReferenceModel, int8_activations

WIDTH = 15


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counting") / f"{request.param}.gguf"
    write_counting_target(path, Formats(request.param))
    return path


def counted(first: int, count: int) -> list[int]:
    tokens = [first]
    while len(tokens) < count:
        tokens.append(successor(tokens[-1]))
    return tokens


def pair(target: Path, folder: Path, kind: Literal["oracle", "blind"], version: int, own_tables: bool = False
         ) -> tuple[ReferenceModel, ReferenceDrafter]:
    path = folder / "drafter.gguf"
    write_counting_drafter(path, target, Formats(target.stem), kind, version, own_tables)
    model = ReferenceModel(*read_model(target), F16, int8_activations)
    return model, ReferenceDrafter(*read_drafter(path), model, F16, int8_activations)


def test_the_successor_goes_round() -> None:
    assert counted(30, 17) == [*range(30, 45), 30, 31]
    assert sorted(successor(token) for token in range(VOCABULARY)) == list(range(VOCABULARY))


@pytest.mark.parametrize("own_tables", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_the_oracle_is_always_right(target: Path, version: int, own_tables: bool, tmp_path: Path) -> None:
    model, drafter = pair(target, tmp_path, "oracle", version, own_tables)
    for first in range(7, VOCABULARY, 2 * PERIOD):
        run = speculate(model, drafter, counted(first, 18), 33, WIDTH)
        assert run.tokens == counted(first, 18 + 33)[18:]
        assert run.accepted == run.proposed == [WIDTH, WIDTH]


@pytest.mark.parametrize("version", [1, 2])
def test_the_blind_always_proposes_the_same(target: Path, version: int, tmp_path: Path) -> None:
    model, drafter = pair(target, tmp_path, "blind", version, own_tables=version == 2)
    run = speculate(model, drafter, counted(7, 18), 20, WIDTH)
    assert run.tokens == counted(7, 18 + 20)[18:]
    assert set(run.accepted) == {0}
    assert drafter.propose(run.tokens[-1], WIDTH) == [proposal_of_the_blind(target)] * WIDTH
