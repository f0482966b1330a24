"""The benchmark of rounds on the small pair: that it measures what it says, never how fast it was.

The peer is our own engine a second time, so that comparisons are there without llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click import BadParameter
from click.testing import CliRunner

from benchmarks import kernels, llama_server, report, round, round_measure, round_pairs, round_report
from benchmarks.contest import Series
from benchmarks.engines import Engine, PeerMissing
from benchmarks.measure import OURS, PEER
from benchmarks.round_measure import RoundMeasurement, Setup
from dflashc.runtime.artefact import load_artefact

PROMPTS = [[1, 5, 9, 13], [7] * 6]


@pytest.fixture(scope="module")
def setup(pycode_artefact: Path, pycode_pair_artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    prompts = tmp_path_factory.mktemp("round") / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    return Setup(pycode_pair_artefact, pycode_artefact, prompts, None, (2, 7), (7,), 8, 1, 256, 6, 1)


@pytest.fixture(scope="module")
def measured(setup: Setup) -> RoundMeasurement:
    return round_measure.measure(setup)


@pytest.fixture
def compared(measured: RoundMeasurement) -> RoundMeasurement:
    """Against a peer whose rounds take twice as long and yield one token."""
    shared = {round_measure.case(w): {OURS: measured.alone[w], PEER: Series((2 * measured.alone[w].median,))}
              for w in (0, 7)}
    kept = {OURS: measured.kept[OURS], PEER: {0: 1.0, 7: 1.0}}
    return RoundMeasurement(shared, measured.alone, kept, measured.bandwidth, measured.needed, measured.kernels)


def test_every_width_is_measured(measured: RoundMeasurement) -> None:
    assert list(measured.alone) == list(measured.needed) == [0, 2, 7]
    assert list(measured.kernels) == [0, 7]
    assert not measured.shared
    assert measured.kept[OURS][0] == 1
    assert all(1 <= measured.kept[OURS][w] <= w + 1 for w in (2, 7))


def test_tables_without_and_with_a_peer(measured: RoundMeasurement, compared: RoundMeasurement) -> None:
    for found in (measured, compared):
        for table in round_report.tables("p", "code", found) + round_report.kernel_tables("p", found):
            assert all(len(row) == len(table.columns) for row in table.rows)
    alone, both = ([b.name for b in round_report.bars(m, "code")] for m in (measured, compared))
    assert alone == ["speculative ÷ plain speed"]
    assert both == ["round of 7 ÷ llama.cpp's", *alone, "speculative speed ÷ llama.cpp's"]
    assert json.loads(json.dumps(round_report.document("copying", compared)))["bars"][0]["found"] == 0.5


def test_costs_must_not_exceed_their_bar() -> None:
    assert report.Bar("cost", 0.45, 0.4, cost=True).reached
    assert not report.Bar("cost", 0.45, 0.5, cost=True).reached


def test_engine_counts_the_tokens_of_rounds(setup: Setup) -> None:
    with setup.engine(setup.artefact) as engine:
        assert engine.ask("kept 0 8") == 1
        assert engine.ask("kept 7 8") == engine.ask("kept 7 8")
        assert engine.ask("rounds 7 8") > 0


def test_every_phase_of_a_round_is_timed(pycode_pair_artefact: Path) -> None:
    times = kernels.profile_round(pycode_pair_artefact, 1, 32, 3, runs=2)
    assert {t.part for t in times} == set(round_report.PHASES)


def test_bytes_of_a_round(pycode_artefact: Path, pycode_pair_artefact: Path) -> None:
    """All matrices of both models once, the head too though it runs twice; the drafter has K and V of its own."""
    artefact = load_artefact(pycode_pair_artefact)
    matrices = sum(w.bytes for w in artefact.manifest.weights if w.rows > 1)
    assert kernels.bytes_of_round(artefact, 0, 7) == pytest.approx(matrices, rel=0.02)
    deeper = kernels.bytes_of_round(artefact, 100, 7) - kernels.bytes_of_round(artefact, 0, 7)
    config = artefact.manifest.config
    assert deeper == 100 * (config["layers"] + 2) * config["kv_heads"] * config["head_size"] * 2 * 2
    plain = load_artefact(pycode_artefact)
    assert kernels.bytes_of_round(plain, 0, 0) == pytest.approx(kernels.bytes_of_run(plain, 0, 1, "ids"))


def test_width_says_which_engine_answers() -> None:
    class Named(Engine):
        def __init__(self, number: float) -> None:
            self.number = number

        def ask(self, request: str) -> float:
            return self.number

    engines = llama_server.ByWidth({0: Named(1.0), 7: Named(2.0)})
    assert [engines.ask(f"rounds {width} 8") for width in (0, 7)] == [1.0, 2.0]


@contextmanager
def answering(lines: bytes) -> Iterator[str]:
    """A server that answers every request with `lines`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(lines)

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def timings(tokens: int, drafted: int, accepted: int) -> dict[str, dict[str, int]]:
    return {"timings": {"predicted_n": tokens, "predicted_ms": 500, "draft_n": drafted, "draft_n_accepted": accepted}}


@pytest.mark.parametrize("streamed", [False, True])
def test_timings_of_the_server(streamed: bool) -> None:
    """Four rounds of three drafts that keep 5: nine tokens after the first. Counters run ahead of a streamed token."""
    if streamed:
        shown = [timings(n, 12, 5) for n in range(1, 10)]
        lines = b"".join(b"data: " + json.dumps(t).encode() + b"\n\n" for t in shown)
    else:
        lines = json.dumps(timings(10, 11, 5)).encode()  # the last draft is cut short
    server = object.__new__(llama_server.LlamaServer)
    server._width = 3
    server._command = ["llama-server"]
    server._options = llama_server.ServerOptions(Path(), Path(), Path(), 1, 256, PROMPTS, streamed)
    with answering(lines) as server._address:
        assert server.ask("rounds 3 8") == 0.125
        assert server.ask("kept 3 8") == 9 / 4


def test_server_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match="not given"):
        llama_server.find_server(None)
    with pytest.raises(PeerMissing, match="bin/llama-server is missing"):
        llama_server.find_server(tmp_path)


def test_pairs_are_chosen_by_name(tmp_path: Path) -> None:
    pairs = [*round_pairs.shipped_pairs(), *round_pairs.synthetic_pairs(tmp_path)]
    assert len({p.name for p in pairs}) == 8
    assert {p.kind for p in round_pairs.choose(pairs, ["*-copying"])} == {"copying"}
    with pytest.raises(BadParameter, match="no pair matches nothing"):
        round_pairs.choose(pairs, ["nothing"])


def test_widths_are_numbers() -> None:
    result = CliRunner().invoke(round.main, ["--widths", "3,x"])
    assert result.exit_code == 2
    assert "no list of widths" in result.output
