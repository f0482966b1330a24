"""Rounds of a plan as they are told: the programs that a session runs, and bytes by formula from the models' shapes."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dflashc.compiler.build import BuildOptions, lower
from dflashc.compiler.inspect_plan import describe_programs, describe_round, describe_rounds
from dflashc.compiler.lower.weights import place_weights
from dflashc.compiler.pair import Overrides
from dflashc.runtime.artefact import Artefact
from dflashc.runtime.errors import RequestError
from dflashc.runtime.manifest import Manifest
from dflashc.runtime.session import Session
from tests.compiler import pair_files
from tests.runtime.scripted import ScriptedDevice

LAYER = (2 * 256 + 2 * 128) * 256 + 3 * 256 * 512
"""Elements of a layer's matrices, alike in the small example's target (4 layers) and drafter (2)."""
HEAD, FUSION = 2048 * 256, 3 * 256 * 256
KEYS_AND_VALUES = 2 * 128 * 256
TOKEN = 2 * 2 * 64 * 2
"""Bytes of a layer's K and V of a token: both, KV heads, head size, float16."""


def planned(model: Path, drafter: Path | None = None, draft_rows: str = "short") -> Artefact:
    """What a build would write, without weights or kernels."""
    options = BuildOptions(model, "cpu-x86-64-v3", Path(), drafter, Overrides(draft_rows=draft_rows), context=512)
    with closing(lower(options)) as lowered:
        pair = lowered.pair
        width = pair.config.block_size - 1 if pair else 0
        manifest = Manifest(
            dflashc="", target="", requirements=lowered.target.requirements(), sources=(),
            config=vars(lowered.config), kv_types=lowered.kv_types, context=512, self_test=(), notes=(),
            weights=tuple(place_weights(lowered.sources.values())),
            drafter={"width": width, "block_rows": width + 1 if draft_rows == "full" else 0, "mask_id": 0,
                     "pair": pair.to_json()} if pair else {})
        return Artefact(Path(), manifest, lowered.plan)


@pytest.fixture(scope="module")
def pair(pycode_model: Path, pycode_drafter: Path) -> Artefact:
    return planned(pycode_model, pycode_drafter)


@pytest.fixture(scope="module")
def full_pair(pycode_model: Path, pycode_drafter: Path) -> Artefact:
    return planned(pycode_model, pycode_drafter, "full")


def q8_0(elements: int) -> int:
    """Bytes: 32 values share a float16 scale."""
    return elements // 32 * 34


def bytes_by_phase(described: dict[str, Any]) -> dict[str, int]:
    return {p["phase"]: p["bytes_read"] for p in described["phases"]}


def test_a_round_reads_matrices_once_but_for_the_drafters_keys_and_values(pair: Artefact) -> None:
    """A block's own K and V need the matrices that the injection reads as well."""
    described = describe_round(pair, "round.7", depth=100)
    assert bytes_by_phase(described) == {
        "positions": 0, "draft": q8_0(2 * LAYER), "propose": q8_0(HEAD), "verify": q8_0(4 * LAYER), "ids": q8_0(HEAD),
        "inject": q8_0(FUSION + 2 * KEYS_AND_VALUES), "accept": 0}
    assert described["least"] == q8_0(6 * LAYER + 2 * HEAD + FUSION)
    assert described["bytes_read"] == described["least"] + q8_0(2 * KEYS_AND_VALUES)
    assert described["cache_bytes"] == described["least_cache"] == 6 * TOKEN * 100
    assert {x["program"] for x in described["launches"]} == {
        "positions.8", "draft.8", "propose.7", "decode.8", "ids.8", "inject.8", "accept.8"}


def test_a_plain_step_is_a_round_of_width_0(pair: Artefact, pycode_model: Path) -> None:
    described = describe_round(pair, "round.0", depth=0)
    assert described["least"] == described["bytes_read"] == q8_0(
        4 * LAYER + HEAD + FUSION + 2 * KEYS_AND_VALUES), "the drafter's caches follow"
    assert list(described["layers"]) == ["target"]
    alone = planned(pycode_model)
    (only,) = describe_rounds(alone)
    assert only["bytes_read"] == only["least"] == q8_0(4 * LAYER + HEAD)
    assert describe_round(alone, "round.0", depth=10)["cache_bytes"] == 4 * TOKEN * 10


def test_windows_bound_what_is_read_of_the_caches(tmp_path: Path) -> None:
    """Target of 6 layers, all but the last with a window of 16, and drafter of 2, the first with one of 32."""
    files = (pair_files.target("gemma3").write(tmp_path / "target.gguf"),
             pair_files.drafter().write(tmp_path / "drafter.gguf"))
    described = describe_round(planned(*files), "round.3", depth=200)
    token = 2 * 2 * 16 * 2
    assert described["least_cache"] == described["cache_bytes"] == token * (5 * 16 + 200 + 32 + 200)


def test_the_overview_has_the_sums_of_the_rounds(pair: Artefact) -> None:
    rounds = describe_rounds(pair)
    assert [r["width"] for r in rounds] == list(range(16))
    for width in (0, 1, 15):
        described = describe_round(pair, f"round.{width}", depth=0)
        for key in ("launches", "barriers", "bytes_read", "flops"):
            assert rounds[width][key] == sum(p[key] for p in described["phases"])
    flops = {p["name"]: p["flops"] for p in describe_programs(pair.plan)}
    assert flops["decode.8"] == 8 * 2 * 4 * LAYER


def test_launches_per_layer_are_those_between_two_layers(pair: Artefact) -> None:
    programs = {p["name"]: p for p in describe_programs(pair.plan)}
    for name, layers in (("decode.8", 4), ("draft.8", 2)):
        operations = [x.operation.removeprefix("drafter.") for x in pair.plan.programs[name].launches]
        starts = [next(i for i, o in enumerate(operations) if o.startswith(f"blk.{layer}")) for layer in range(layers)]
        gaps = [b - a for a, b in pairwise(starts)]
        assert programs[name]["launches_per_layer"] == [min(gaps), max(gaps)]
    assert programs["ids.8"]["launches_per_layer"] == []


@pytest.mark.parametrize("name", ["round.16", "round.x", "round."])
def test_rounds_that_do_not_exist(pair: Artefact, name: str) -> None:
    with pytest.raises(RequestError, match=r"it has round\.0 to round\.15"):
        describe_round(pair, name, depth=0)


class _Recorded(Exception):
    pass


class Recorder(ScriptedDevice):
    """Ends a session at the first run, and keeps what it would have run."""

    def record(self, launches: Any, memories: Any, context: int) -> NoReturn:
        self.launches = [(x.kernel, x.operation) for x in launches]
        raise _Recorded


@pytest.mark.parametrize("draft_rows", ["short", "full"])
@pytest.mark.parametrize("width", [0, 1, 7, 15])
def test_a_session_runs_the_round_that_is_told(pair: Artefact, full_pair: Artefact, draft_rows: str,
                                               width: int) -> None:
    artefact = full_pair if draft_rows == "full" else pair
    device = Recorder(lambda tokens: 0, 2048)
    with pytest.raises(_Recorded):
        Session(artefact, device, 256).round(0, width)
    told = describe_round(artefact, f"round.{width}", depth=0)["launches"]
    assert [(x["kernel"], x["operation"]) for x in told] == device.launches
