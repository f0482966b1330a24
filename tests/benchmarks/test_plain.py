"""The benchmark's pieces on the small example model: that they measure what they say, never how fast it was.

The peer is the artefact's own engine a second time, so that ratios are there without llama.cpp.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from click import ClickException
from click.testing import CliRunner

from benchmarks import engines, kernels, machine, measure, plain, report
from benchmarks.contest import Case, Contestant, Series, contest
from benchmarks.measure import IDS, OURS, PEER, Measurement
from dflashc.runtime.artefact import load_artefact

DEPTHS = (0, 64)


@pytest.fixture(scope="module")
def measured(pycode_artefact: Path) -> Measurement:
    command = engines.dflashc_command(pycode_artefact, 1)
    return measure.measure({OURS: command, PEER: command}, pycode_artefact, DEPTHS, 1, 1)


def test_every_case_is_measured_for_every_contestant(measured: Measurement) -> None:
    assert list(measured.results) == [c.name for c in measure.cases(DEPTHS)]
    for row in measured.results.values():
        assert set(row) == {OURS, IDS, PEER}
        assert all(len(series.values) == 1 and series.median > 0 for series in row.values())
    assert set(measured.busy) == {"decode at 0"}
    assert set(measured.start) == set(measured.memory) == {OURS, PEER}


def test_bars_and_tables(measured: Measurement) -> None:
    names = [bar.name for bar in report.bars(measured, DEPTHS)]
    assert names == ["decode at 0", "decode at 64", "verify[8]", "verify[16]", "attention at 64", "prefill 512",
                     "time to the first token", "peak memory", "speed of decode at 0 kept beside busy processes"]
    for table in report.tables("m", measured, DEPTHS):
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert json.loads(json.dumps(report.document(measured, DEPTHS)))["bars"][0]["required"] == 1.4


def test_without_llama_cpp_one_bar_is_left(measured: Measurement) -> None:
    results, busy = ({case: {n: s for n, s in row.items() if n != PEER} for case, row in found.items()}
                     for found in (measured.results, measured.busy))
    alone = replace(measured, results=results, busy=busy, start={OURS: measured.start[OURS]},
                    memory={OURS: measured.memory[OURS]})
    assert len(report.bars(alone, DEPTHS)) == 1
    (times, *_) = report.tables("m", alone, DEPTHS)
    assert not any("ratio" in column or PEER in column for column in times.columns)


def test_ratio_is_taken_round_by_round() -> None:
    peer, ours = Series((2.0, 9.0, 4.0)), Series((1.0, 3.0, 4.0))
    assert peer.ratio(ours).values == (2.0, 3.0, 1.0)
    assert peer.ratio(ours).text() == "2.00 (1.00-3.00)"


class Scripted(engines.Engine):
    """Answers with the number of the request among those in `asked`; waits for a core as `disturbed` says by number."""

    def __init__(self, name: str, asked: list[str], disturbed: Mapping[int, float] = MappingProxyType({})) -> None:
        self.name, self.asked, self.disturbed, self.total = name, asked, disturbed, 0.0

    def ask(self, request: str) -> float:
        self.asked.append(f"{self.name} {request}")
        self.total += self.disturbed.get(len(self.asked), 0.0)
        return float(len(self.asked))

    def waited(self) -> float:
        return self.total


def test_rounds_alternate_and_the_first_is_not_counted() -> None:
    asked: list[str] = []
    players = [Contestant("a", Scripted("a", asked), "ids"), Contestant("b", Scripted("b", asked), "logits")]
    results = contest([Case("decode", "run 0 1 4 {head}")], players, 2)
    a, b = "a run 0 1 4 ids", "b run 0 1 4 logits"
    assert asked == [b, a, a, b, b, a]
    assert results["decode"]["a"].values == (3.0, 6.0)


def test_disturbed_samples_are_taken_again() -> None:
    player = Contestant("a", Scripted("a", [], {1: 1, 2: 1, 3: 1, 5: 1e9, 6: 1, 7: 1e9}), "ids")
    (series,) = contest([Case("decode", "run")], [player], 2, attempts=3)["decode"].values()
    assert series == Series((4.0, 6.0), disturbed=1)  # 1 warms up, 6 waited least of the second round


def test_bytes_of_a_run(pycode_artefact: Path) -> None:
    """Each weight matrix once, and K and V of every token in f16: from the manifest's shapes."""
    artefact = load_artefact(pycode_artefact)
    config = artefact.manifest.config
    weights = sum(w.bytes for w in artefact.manifest.weights if w.rows > 1)
    token = config["layers"] * config["kv_heads"] * config["head_size"] * 2 * 2
    found = [kernels.bytes_of_run(artefact, depth, 1, "logits") for depth in (0, 100)]
    assert found[1] - found[0] == 100 * token
    assert found[0] == pytest.approx(weights, rel=0.02)


def test_profile_covers_the_whole_program(pycode_artefact: Path) -> None:
    programs = load_artefact(pycode_artefact).plan.programs
    for rows, head_rows in ((2, 2), (64, 1)):
        times = kernels.profile(pycode_artefact, 1, 32, rows, "logits", runs=2)
        counted = {part: sum(t.launches for t in times if t.part == part) for part in ("decode", "logits")}
        assert counted == {"decode": len(programs[f"decode.{rows}"].launches),
                           "logits": len(programs[f"logits.{head_rows}"].launches)}
        assert [t.seconds for t in times] == sorted((t.seconds for t in times), reverse=True)
        report.profile_table("m", times)


def test_read_bandwidth_is_positive() -> None:
    assert machine.read_bandwidth(2, nbytes=1 << 16, repeats=1) > 0


def test_busy_processes_are_gone_afterwards() -> None:
    with machine.busy_processes(1) as (process,):
        assert process.poll() is None
    assert process.poll() is not None


def test_peer_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(engines.PeerMissing, match="not given"):
        engines.compile_llama_cpp(None, tmp_path)
    with pytest.raises(engines.PeerMissing, match="no build folder"):
        engines.compile_llama_cpp(tmp_path, tmp_path)


def test_source_that_does_not_compile_is_told(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "libllama.so").touch()
    (tmp_path / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={tmp_path}\n")
    with pytest.raises(engines.PeerMissing, match=r"cannot run|does not compile"):
        engines.compile_llama_cpp(tmp_path, tmp_path)


def test_engine_that_dies_is_reported(pycode_artefact: Path) -> None:
    engine = engines.Engine(engines.dflashc_command(pycode_artefact, 1))
    with engine, pytest.raises(ClickException, match="ended with 1 at 'run 7"):
        engine.ask("run 7 1 1 logits")


def test_command_needs_a_model_that_exists() -> None:
    result = CliRunner().invoke(plain.main, [os.devnull + "/none.gguf"])
    assert result.exit_code == 2
