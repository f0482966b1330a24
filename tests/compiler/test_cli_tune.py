"""`dflashc tune` on the small pair, with as little measuring as it can do; and its tables for a given record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflashc.compiler.cli_tune import TuneOptions, acceptance_table, best_choices, cost_tables, tune
from dflashc.compiler.plot_tuning import check_plot, plot
from dflashc.runtime.artefact import verify_hashes
from dflashc.runtime.choose_width import make_width
from dflashc.runtime.errors import RequestError
from dflashc.runtime.generate import load
from dflashc.runtime.tuning import Counts, Key, Record
from dflashc.runtime.width import AutoWidth

RECORD = Record(
    Key("a" * 64, "a processor, 2 threads", "0", 1), (0, 1024), rounds=((0.010, 0.012, 0.030), (0.020, 0.060, 0.090)),
    draft=((0.0, 0.001, 0.002),) * 2, verify=((0.00005, 1.5, 0.02),) * 2, inject=((0.001,) * 3,) * 2,
    acceptance={"code": Counts((90, 45), (100, 100)), "prose": Counts((0, 0), (100, 100))})


def options(artefact: Path, **changes: object) -> TuneOptions:
    return replace(TuneOptions(artefact, 1, None, False, 256, 0.0, 8, None, False, False), **changes)  # type: ignore[arg-type]


def test_the_best_width_is_the_one_with_most_tokens_per_second() -> None:
    """1.9 tokens in 1.2 plain steps, and nothing that beats plain decoding at depth or without acceptance."""
    found = [(c.kind, c.depth, c.width, round(c.speedup, 2)) for c in best_choices(RECORD)]
    assert found == [("code", 0, 1, 1.58), ("code", 1024, 0, 1.0), ("prose", 0, 0, 1.0), ("prose", 1024, 0, 1.0)]


def test_tables() -> None:
    first, _ = cost_tables(RECORD)
    assert first.rows == [["0", "-", "0.0500", "1.00", "10.0", "1.00"], ["1", "1.00", "1500", "1.00", "12.0", "1.20"],
                          ["2", "2.00", "20.0", "1.00", "30.0", "3.00"]]
    assert acceptance_table(RECORD).rows == [
        ["code", "100", "2.35", "0.90", "0.45"], ["prose", "100", "1.00", "0.00", "0.00"]]


def test_a_model_alone_is_refused(pycode_artefact: Path) -> None:
    with pytest.raises(RequestError, match="no drafter"):
        tune(options(pycode_artefact))


def test_tuned_artefacts_are_run_by_their_record(pycode_pair_artefact: Path, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tune(options(pycode_pair_artefact, as_json=True))
    document = json.loads(capsys.readouterr().out)
    assert document["depths"] == [0, 240]
    assert all(len(row) == 16 and min(row) > 0 for row in document["rounds"])
    assert {c["kind"] for c in document["choices"]} == {"code", "prose", "chat"}
    with load(pycode_pair_artefact, 1) as model:
        controller, (note,) = make_width(model.artefact, model.device, "auto")
        verify_hashes(model.artefact)
    assert isinstance(controller, AutoWidth)
    assert document["path"] in note
    tune(options(pycode_pair_artefact))
    shown = capsys.readouterr().out
    assert "Round at depth 240 (ms)" in shown
    assert "Best width" in shown


def test_a_plot_is_refused_early_or_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"\.png"):
        check_plot(tmp_path / "x.txt")
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    for suffix in ("png", "svg"):
        check_plot(tmp_path / f"x.{suffix}")
        plot(RECORD, tmp_path / f"x.{suffix}")
        assert (tmp_path / f"x.{suffix}").stat().st_size > 1000
