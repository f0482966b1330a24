"""What must hold of any artefact, shown on the built example model: bits do not depend on how the work is cut.

Chunks of a prompt, rows of a program, threads, rewinding, a second session on the device: none may change a single bit
of logits or caches, or speculation would change what a model says.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.device.cpu import CpuDevice
from dflashc.runtime.errors import RequestError
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from tests.proof.running import GREEDY, cache_bytes, device_of, greedy, logits_along, same_bits, session_of

TEXT = np.random.default_rng(0).integers(0, 2048, 600).tolist()
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300)
CHUNKINGS = (
    [1, 2, 3, 5, 7, 11, 13, 16, 16, 15], [64, 16, 9], [9, 64, 16], [256, 16, 16, 1], [16] * 18, [64, 64, 1, 64, 64, 2],
)
SAMPLING = SamplingParameters(temperature=0.9, seed=7)


@pytest.fixture(scope="module")
def device(pycode_artefact: Path) -> Iterator[CpuDevice]:
    with device_of(pycode_artefact) as device:
        yield device


@pytest.fixture
def session(pycode_artefact: Path, device: CpuDevice) -> Session:
    """A fresh session, its caches zero."""
    return Session(load_artefact(pycode_artefact), device, 1024)


@pytest.fixture
def other(pycode_artefact: Path, device: CpuDevice) -> Session:
    """Another session on the same device."""
    return Session(load_artefact(pycode_artefact), device, 1024)


@pytest.fixture(scope="module")
def alone(pycode_artefact: Path, device: CpuDevice) -> np.ndarray:
    """Logits after every token of the text, computed one token at a time."""
    return logits_along(Session(load_artefact(pycode_artefact), device, 1024), TEXT, rows=1)


def same_caches(a: Session, b: Session) -> bool:
    ours, theirs = cache_bytes(a), cache_bytes(b)
    return ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_token_by_token(length: int, session: Session, other: Session, alone: np.ndarray) -> None:
    session.prefill(TEXT[:length], "logits")
    logits_along(other, TEXT[:length], rows=1)
    assert same_bits(session.logits(1)[0], alone[length - 1])
    assert same_caches(session, other)


@pytest.mark.parametrize("chunks", CHUNKINGS, ids=str)
def test_any_chunks(chunks: list[int], session: Session, other: Session, alone: np.ndarray) -> None:
    ends = list(itertools.accumulate(chunks))
    for start, end in itertools.pairwise([0, *ends]):
        session.decode(TEXT[start:end], "logits", end - start - 1, 1)
        assert same_bits(session.logits(1)[0], alone[end - 1])
    logits_along(other, TEXT[: ends[-1]], rows=1)
    assert same_caches(session, other)


@pytest.mark.parametrize("rows", range(1, 17))
def test_rows_of_a_program_are_independent(rows: int, session: Session, alone: np.ndarray) -> None:
    for start in (0, 1, 37, 249, 256, 505):
        session.prefill(TEXT[: start + 1], "ids")
        session.rewind(start)
        session.decode(TEXT[start : start + rows], "logits", 0, rows)
        assert same_bits(session.logits(rows), alone[start : start + rows])
        session.rewind(start)
        session.decode(TEXT[start : start + rows], "ids", 0, rows)
        assert session.ids(rows).tolist() == alone[start : start + rows].argmax(axis=-1).tolist()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(threads: int, pycode_artefact: Path, session: Session, alone: np.ndarray) -> None:
    session.prefill(TEXT, "logits")
    with session_of(pycode_artefact, threads=threads) as threaded:
        assert same_bits(logits_along(threaded, TEXT), alone)
        threaded.rewind(0)
        threaded.prefill(TEXT, "logits")
        assert same_bits(threaded.logits(1), session.logits(1))
        assert same_caches(threaded, session)


def test_a_prefix_is_reused_without_a_trace(session: Session, other: Session) -> None:
    session.prefill(TEXT[:300], "logits")
    branch = [*TEXT[:120], *TEXT[400:500]]
    assert session.prefill(branch, "logits") == 120
    assert other.prefill(branch, "logits") == 0
    assert same_bits(session.logits(1), other.logits(1))
    assert session.prefill(branch, "logits") == len(branch) - 1
    assert same_bits(session.logits(1), other.logits(1))


def test_forgotten_tokens_leave_no_trace(session: Session, alone: np.ndarray) -> None:
    for length in (300, 17, 256, 1):
        session.rewind(0)
        session.prefill(TEXT[:length], "ids")
        session.decode([5] * 16, None)
        session.rewind(length - 1)
        session.decode([TEXT[length - 1]], "logits", 0, 1)
        assert same_bits(session.logits(1)[0], alone[length - 1])


def test_two_sessions_share_a_device(session: Session, other: Session) -> None:
    expected = [greedy(session, TEXT[:20], 30), greedy(session, TEXT[100:170], 30)]
    session.rewind(0)
    turns = zip(session.generate(TEXT[:20], GREEDY, 30), other.generate(TEXT[100:170], GREEDY, 30), strict=True)
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == expected


def test_a_context_can_be_filled_to_the_last_token(pycode_artefact: Path, device: CpuDevice,
                                                   session: Session) -> None:
    small = Session(load_artefact(pycode_artefact), device, 256)
    for length in (256, 255, 240, 1):
        small.rewind(0)
        generated = list(small.generate(TEXT[:length], GREEDY, 300))
        assert len(generated) == 256 - length + 1  # the last one needs no room
        assert generated == greedy(session, TEXT[:length], len(generated))
    small.rewind(0)
    small.prefill(TEXT[:256], "ids")
    with pytest.raises(RequestError, match="the context is full: 256 tokens and 1 more do not fit 256"):
        small.decode([1], "ids", 0, 1)
    assert small.tokens == TEXT[:256]
    with pytest.raises(RequestError, match="the prompt has 257 tokens, the context 256"):
        small.prefill(TEXT[:257], "ids")
    assert greedy(small, TEXT[:20], 5) == greedy(session, TEXT[:20], 5)


def test_a_seed_decides_what_is_sampled(session: Session, other: Session) -> None:
    def sampled(where: Session, seed: int) -> list[int]:
        where.rewind(0)
        return list(where.generate(TEXT[:10], SamplingParameters(temperature=0.9, seed=seed), 40))

    first = sampled(session, 7)
    assert sampled(other, 7) == first
    assert sampled(session, 7) == first
    assert sampled(session, 8) != first


def test_a_greedy_step_moves_only_ids_between_host_and_device(session: Session, device: CpuDevice) -> None:
    """Nothing goes up, a token and a count come down, and the host waits once; whatever the vocabulary."""
    tokens = session.generate(TEXT[:10], GREEDY, 60)
    list(itertools.islice(tokens, 2))  # the first step tells the device where the text stands
    before = np.array([device.uploaded, device.downloaded, device.synchronisations])
    steps = len(list(tokens))
    after = np.array([device.uploaded, device.downloaded, device.synchronisations])
    assert (after - before).tolist() == [0, 8 * steps, steps]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow_with_tokens(session: Session) -> None:
    def run(count: int) -> None:
        session.rewind(0)
        for _ in session.generate(TEXT[:10], SAMPLING, count):
            pass

    run(1000)
    gc.collect()
    before = resident_bytes()
    run(1000)
    run(1000)
    gc.collect()
    assert resident_bytes() - before < 2 << 20


def test_memory_does_not_grow_with_sessions(pycode_artefact: Path, device: CpuDevice) -> None:
    artefact = load_artefact(pycode_artefact)
    caches = artefact.plan.memory(1024)["cache"]

    def run(count: int) -> None:
        for _ in range(count):
            Session(artefact, device, 1024).prefill(TEXT, "ids")

    run(2)
    gc.collect()
    before = resident_bytes()
    run(10)
    gc.collect()
    assert resident_bytes() - before < caches  # of one session; ten were filled


def test_sessions_may_go_while_workers_are_late(pycode_artefact: Path) -> None:
    """More threads than cores, so that some still walk the launches of a run when its session is gone."""
    artefact = load_artefact(pycode_artefact)
    with device_of(pycode_artefact, threads=8) as device:
        expected = greedy(Session(artefact, device, 256), TEXT[:3], 3)
        for _ in range(100):
            assert greedy(Session(artefact, device, 256), TEXT[:3], 3) == expected


def test_nothing_need_be_closed_at_exit(pycode_artefact: Path) -> None:
    script = f"""
from pathlib import Path
from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.device.cpu import CpuDevice
from dflashc.runtime.session import Session
artefact = load_artefact(Path({str(pycode_artefact)!r}))
session = Session(artefact, CpuDevice(artefact.kernels, 2), 256)
session.prefill([1, 2, 3], "ids")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
