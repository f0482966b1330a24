"""Tuning records: stored, found for their own artefact and device alone, and refused when they are damaged."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dflashc.runtime import tuning
from dflashc.runtime.artefact import Artefact
from dflashc.runtime.choose_width import make_width
from dflashc.runtime.errors import ArtefactError, RequestError
from dflashc.runtime.manifest import File, Manifest, Requirements
from dflashc.runtime.plan import Plan
from dflashc.runtime.processors import processor_name
from dflashc.runtime.prompts import KINDS, load_prompts
from dflashc.runtime.tuning import Counts, Key, Record
from dflashc.runtime.width import AutoWidth, FixedWidth


@dataclass
class NamedDevice:
    """All of a device that records depend on."""

    identity: str = "a processor, 2 threads"


def artefact(directory: Path, most: int = 2, kernels: str = "k") -> Artefact:
    files = {name: File(1, sha) for name, sha in (("kernels.so", kernels), ("plan.json", "p"), ("weights.bin", "w"))}
    manifest = Manifest(
        dflashc="", target="cpu", requirements=Requirements("", "", (), 1), sources=(), config={},
        drafter={"width": most} if most else {}, kv_types={}, context=256, weights=(), self_test=(), notes=(),
        files=files)
    return Artefact(directory, manifest, Plan({}, {}, 256))


def record(of: Artefact, device: Any = None) -> Record:
    table = ((1.0, 1.5, 2.0), (2.0, 4.0, 8.0))
    return Record(Key.of(of, device or NamedDevice()), (0, 100), table, table, table, table,
                  {"code": Counts((80, 60), (100, 100)), "prose": Counts((40, 0), (100, 100))})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dflashc" / "tuning"


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    made = record(artefact(tmp_path))
    assert Record.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize("in_artefact", [False, True], ids=["in the cache", "in the artefact"])
def test_found_where_it_is_stored(tmp_path: Path, cache: Path, in_artefact: bool) -> None:
    of = artefact(tmp_path / "x.dflash")
    folder = tuning.artefact_folder(of) if in_artefact else tuning.cache_folder()
    assert tuning.cache_folder() == cache
    path = tuning.save(record(of), folder)
    assert path.parent.parent == folder
    assert tuning.find(of, NamedDevice()) == (record(of), str(path))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_users_record_comes_before_the_artefacts(tmp_path: Path) -> None:
    of = artefact(tmp_path / "x.dflash")
    tuning.save(record(of), tuning.artefact_folder(of))
    own = replace(record(of), depths=(0, 200))
    tuning.save(own, tuning.cache_folder())
    assert tuning.find(of, NamedDevice())[0] == own


def test_a_record_of_another_device_is_not_used(tmp_path: Path) -> None:
    of = artefact(tmp_path)
    tuning.save(record(of, NamedDevice("a processor, 1 thread")), tuning.cache_folder())
    assert tuning.find(of, NamedDevice()) == (None, "tuned, but not for a processor, 2 threads")


def test_a_record_of_another_artefact_is_not_used(tmp_path: Path) -> None:
    tuning.save(record(artefact(tmp_path, kernels="other")), tuning.cache_folder())
    assert tuning.find(artefact(tmp_path), NamedDevice()) == (None, "never tuned on this machine")


def test_a_record_under_a_false_name_is_not_used(tmp_path: Path) -> None:
    of = artefact(tmp_path)
    path = Key.of(of, NamedDevice()).path(tuning.cache_folder())
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record(artefact(tmp_path, kernels="other")).to_json()))
    found, why = tuning.find(of, NamedDevice())
    assert found is None
    assert "another artefact or device" in why


@pytest.mark.parametrize(("path", "value"), [
    (["schema"], 99), (["depths"], [100, 0]), (["depths"], []), (["depths"], [0, 1.5]), (["rounds", 0], [1.0]),
    (["rounds", 0, 1], 0.0), (["rounds", 0, 1], float("nan")), (["rounds", 0, 1], -1.0), (["rounds"], []),
    (["draft", 1, 0], "x"), (["acceptance", "code", "reached"], [1]), (["acceptance", "code", "reached"], [200, 0]),
    (["acceptance"], None), (["key", "abi"], "1"), (["key"], {}),
])
def test_damage_is_refused(tmp_path: Path, path: list[Any], value: Any) -> None:
    document = json.loads(json.dumps(record(artefact(tmp_path)).to_json()))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ArtefactError):
        Record.from_json(document)


@pytest.mark.parametrize("text", ["", "[]", "nonsense", "1" * 2_000_000])
def test_a_damaged_file_is_told_and_not_used(tmp_path: Path, text: str) -> None:
    of = artefact(tmp_path)
    path = Key.of(of, NamedDevice()).path(tuning.cache_folder())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    controller, notes = make_width(of, NamedDevice(), "auto")
    assert isinstance(controller, AutoWidth)
    assert str(path) in notes[0]
    assert "tuning record" in notes[0]


def test_counts_give_shares_and_conditional_shares() -> None:
    counts = Counts((800, 400, 100, 0), (1000, 1000, 1000, 1000))
    assert counts.per_position() == [0.8, 0.4, 0.1, 0.0]
    assert counts.conditional() == pytest.approx([0.8, 0.5, 0.25, 0.0], abs=0.02)
    assert Counts((0, 0), (0, 0)).conditional() == [0.0, 0.0]


def test_a_number_is_a_fixed_width(tmp_path: Path) -> None:
    controller, notes = make_width(artefact(tmp_path), NamedDevice(), 2)
    assert isinstance(controller, FixedWidth)
    assert controller.choose(0) == 2
    assert notes == []


def test_a_width_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="makes 0 to 2"):
        make_width(artefact(tmp_path), NamedDevice(), 3)
    with pytest.raises(RequestError, match="no drafter"):
        make_width(artefact(tmp_path, most=0), NamedDevice(), 1)


def test_without_a_drafter_there_is_no_controller(tmp_path: Path) -> None:
    assert make_width(artefact(tmp_path, most=0), NamedDevice(), 0) == (None, [])
    assert make_width(artefact(tmp_path, most=0), NamedDevice(), "auto")[0] is None


def test_auto_says_that_it_learns_or_by_which_record_it_goes(tmp_path: Path) -> None:
    of = artefact(tmp_path)
    controller, (note,) = make_width(of, NamedDevice(), "auto")
    assert isinstance(controller, AutoWidth)
    assert controller.promises(0) == []
    assert "learning" in note
    assert "never tuned" in note
    path = tuning.save(record(of), tuning.cache_folder())
    controller, (note,) = make_width(of, NamedDevice(), "auto")
    assert isinstance(controller, AutoWidth)
    assert str(path) in note
    promises = controller.promises(50)
    assert [p.seconds for p in promises] == [1.5, 2.75, 5.0]
    assert promises[1].tokens == pytest.approx(1 + (0.8 + 0.4) / 2, abs=0.02)
    _, (note,) = make_width(of, NamedDevice(), "auto", as_recorded=False)
    assert "learning" in note


def test_the_prompts_are_there() -> None:
    prompts = load_prompts()
    assert tuple(prompts) == KINDS
    assert all(len(texts) == 6 and all(texts) for texts in prompts.values())


def test_processor_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nstepping\t: 1\n\n"
                    "processor\t: 1\nmodel name\t: other\n")
    assert processor_name(info) == "AMD EPYC (26/2/1)"
