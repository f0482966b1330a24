"""`dflashc run`: streams, statistics, conversations, interrupts."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflashc.runtime.generate import load
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from tests.compiler.command import COMMAND, Here, beside

PROMPT = "def main():\n"
STATISTICS = re.compile(
    r"\[prompt (\d+) tokens, (\d+) cached(?:, [\d,.]+ tok/s)?; generated (\d+) tokens(?:, [\d,.]+ tok/s)?"
    r"(?:, \d+ of \d+ drafted accepted)?; "
    r"loaded in [\d.]+ s; finish: (\w+)\]")


@pytest.fixture
def dflashc(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)


@pytest.fixture(scope="module")
def continuation(pycode_artefact: Path) -> str:
    """Greedy continuation of PROMPT by 24 tokens, from a session."""
    with load(pycode_artefact) as model:
        tokens = model.generator(256).session.generate(model.encode(PROMPT), SamplingParameters(temperature=0), 24)
        return model.tokenizer.decode(list(tokens))


@pytest.fixture
def without_template(pycode_artefact: Path, tmp_path: Path) -> Path:
    """The artefact with a manifest and a tokenizer that know no chat template."""
    import hashlib
    import json

    copy = shutil.copytree(pycode_artefact, tmp_path / "plain")
    settings = copy / "tokenizer" / "tokenizer.json"
    document = json.loads(settings.read_text())
    document["chat_templates"] = {}
    settings.write_text(json.dumps(document))
    manifest = json.loads((copy / "manifest.json").read_text())
    data = settings.read_bytes()
    manifest["files"]["tokenizer/tokenizer.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def counts(err: str) -> list[tuple[str, ...]]:
    """(prompt, cached, generated, finish) of every line of statistics."""
    return [m.groups() for m in STATISTICS.finditer(err)]


def test_text_on_one_stream_and_statistics_on_the_other(dflashc: Here, pycode_artefact: Path,
                                                        continuation: str) -> None:
    result = dflashc("run", pycode_artefact, "--raw", "-p", PROMPT, "--temp", 0, "--max-tokens", 24)
    assert result.code == 0, result.err
    assert result.out == continuation + "\n"
    assert counts(result.err) == [("4", "0", "24", "length")]


def test_the_time_is_shared_out(dflashc: Here, pycode_artefact: Path) -> None:
    err = dflashc("run", pycode_artefact, "--raw", "-p", PROMPT, "--temp", 0, "--max-tokens", 24).err
    (line,) = re.findall(r"^\[time: (.*)\]$", err, re.MULTILINE)
    shares = dict(part.removesuffix(" %").rsplit(" ", 1) for part in line.split(", "))
    assert {"decode", "ids"} <= set(shares)
    assert sum(map(int, shares.values())) == pytest.approx(100, abs=len(shares))


def test_quiet(dflashc: Here, pycode_artefact: Path, continuation: str) -> None:
    result = dflashc("run", pycode_artefact, "--raw", "-p", PROMPT, "--temp", 0, "--max-tokens", 24, "--quiet")
    assert (result.out, result.err) == (continuation + "\n", "")


def test_a_seed_repeats(dflashc: Here, pycode_artefact: Path) -> None:
    seven = [dflashc("run", pycode_artefact, "-p", PROMPT, "--seed", 7, "--max-tokens", 16).out for _ in range(2)]
    assert seven[0] == seven[1]
    assert dflashc("run", pycode_artefact, "-p", PROMPT, "--seed", 8, "--max-tokens", 16).out != seven[0]


def test_stop_strings(dflashc: Here, pycode_artefact: Path, continuation: str) -> None:
    stop = continuation[10:13]
    result = dflashc("run", pycode_artefact, "--raw", "-p", PROMPT, "--temp", 0, "--max-tokens", 24, "--stop", stop,
                     "--stop", "never")
    assert result.out == continuation[: continuation.index(stop)] + "\n"
    assert counts(result.err)[0][3] == "stop"


def test_a_prompt_from_a_file_or_standard_input(dflashc: Here, pycode_artefact: Path, tmp_path: Path,
                                                continuation: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")  # editors end files with a newline
    options = ["--raw", "--temp", "0", "--max-tokens", "24", "-q"]
    assert dflashc("run", pycode_artefact, "-f", file, *options).out == continuation + "\n"
    assert beside("run", pycode_artefact, "-f", "-", *options, stdin=PROMPT + "\n").out == continuation + "\n"
    file.write_bytes(b"\xff")
    assert "not UTF-8" in dflashc.error(2, "run", pycode_artefact, "-f", file)


def test_an_empty_prompt(dflashc: Here, pycode_artefact: Path) -> None:
    assert "the prompt is empty" in dflashc("run", pycode_artefact, "--raw", "-p", "").err


def test_a_context_larger_than_the_artefact_has_is_said(dflashc: Here, pycode_artefact: Path) -> None:
    result = dflashc("run", pycode_artefact, "-p", "x", "--ctx", 9999, "--max-tokens", 1)
    assert "a context of 9999 tokens was asked for; using 1024" in result.err


def test_a_prompt_longer_than_the_context(dflashc: Here, pycode_artefact: Path) -> None:
    result = dflashc("run", pycode_artefact, "--raw", "-p", "x " * 2000, "-q")
    assert result.code == 2
    assert "context" in result.err


def test_a_full_context_is_said(dflashc: Here, pycode_artefact: Path) -> None:
    result = dflashc("run", pycode_artefact, "--raw", "-p", PROMPT, "--ctx", 256, "--temp", 0)
    assert counts(result.err) in ([("4", "0", "253", "context")], [("4", "0", counts(result.err)[0][2], "stop")])


def test_too_many_threads(dflashc: Here, pycode_artefact: Path) -> None:
    assert "threads asked for" in dflashc.error(2, "run", pycode_artefact, "-p", "x", "--threads", 10**6)


def test_one_thread_says_the_same(dflashc: Here, pycode_artefact: Path, continuation: str) -> None:
    result = dflashc("run", pycode_artefact, "--raw", "-p", PROMPT, "--temp", 0, "--max-tokens", 24, "--threads", 1)
    assert result.out == continuation + "\n"


def test_verbose_says_what_is_used(dflashc: Here, pycode_artefact: Path) -> None:
    err = dflashc("-v", "run", pycode_artefact, "-p", "x", "--threads", 1, "--max-tokens", 1, "--seed", 3).err
    assert "pycode-3m, target cpu" in err
    assert "1 thread, context 1024" in err
    assert "seed 3" in err


def test_control_tokens_in_a_raw_prompt(dflashc: Here, pycode_artefact: Path) -> None:
    options = ["run", pycode_artefact, "--raw", "-p", "<|im_end|>", "--max-tokens", 1]
    assert counts(dflashc(*options).err)[0][0] == "1"
    assert int(counts(dflashc(*options, "--no-special").err)[0][0]) > 1


# pairs


def test_a_width_needs_a_drafter(dflashc: Here, pycode_artefact: Path) -> None:
    message = dflashc.error(2, "run", pycode_artefact, "-p", "x", "--width", 2)
    assert message == "a width of 2 drafted tokens was asked for; this artefact has no drafter"


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [["--temp", 0], ["--seed", 5]], ids=["greedy", "sampled"])
def test_a_drafter_changes_the_speed_and_not_the_text(dflashc: Here, pycode_pair_artefact: Path,
                                                      sampling: list[object]) -> None:
    options = ["run", pycode_pair_artefact, "--raw", "-p", PROMPT, "--max-tokens", 40, *sampling]
    plain = dflashc(*options, "--width", 0)
    assert "drafted" not in plain.err
    for width in ([], ["--width", 1], ["--width", 15]):
        drafted = dflashc(*options, *width)
        assert drafted.out == plain.out
        assert re.search(r"tok/s, [1-9]\d* of \d+ drafted accepted;", drafted.err)
        assert re.search(r"^\[speculation: \d+ tokens in \d+ rounds, .* per position\]$", drafted.err, re.MULTILINE)
    assert "this drafter makes 0 to 15" in dflashc.error(2, *options, "--width", 16)


@pytest.mark.slow
def test_drafts_that_are_cut_and_a_rule_that_cannot_be(dflashc: Here, pycode_pair_artefact: Path) -> None:
    options = ["run", pycode_pair_artefact, "--raw", "-p", PROMPT, "--max-tokens", 40, "--width", 7]
    cut = dflashc(*options, "--temp", 0, "--p-min", 0.4)
    assert cut.out == dflashc(*options, "--temp", 0).out
    assert re.search(r"^\[speculation: .* p-min left \d\.\d of \d\.\d proposals, ", cut.err, re.MULTILINE)
    sampled = dflashc(*options, "--seed", 5, "--accept", "reject")
    assert "accepted by matching 0." in sampled.err
    assert "note: proposals are accepted by matching: this drafter gives them no probabilities" in sampled.err
    assert "p_min is 2.0, expected a number" in dflashc.error(2, *options, "--p-min", 2)
    assert "accept is 'x', expected one of auto" in dflashc.error(2, *options, "--accept", "x")


@pytest.mark.slow
def test_a_seed_that_may_not_repeat_is_noted(dflashc: Here, pycode_model: Path, tmp_path: Path) -> None:
    artefact = tmp_path / "pycode.dflash"
    drafter = pycode_model.with_name("pycode-3m-dflash2-q8_0.gguf")
    assert dflashc("build", pycode_model, "--drafter", drafter, "--target", "cpu", "-o", artefact).code == 0
    options = ["run", artefact, "--raw", "-p", PROMPT, "--max-tokens", 40]
    note = "note: the seed may not give this text again"
    by_rejection = dflashc(*options, "--seed", 5)
    assert "accepted by rejection" in by_rejection.err
    assert note in by_rejection.err
    for repeatable in (["--seed", 5, "--width", 3], ["--seed", 5, "--accept", "match"]):
        first = dflashc(*options, *repeatable)
        assert note not in first.err
        assert dflashc(*options, *repeatable).out == first.out
    assert note not in dflashc(*options).err


@pytest.mark.slow
def test_tokens_that_the_host_draws_are_noted_once(pycode_pair_artefact: Path) -> None:
    result = beside("run", pycode_pair_artefact, "--chat", "--top-k", 0, "--seed", 1, "--max-tokens", 4,
                    stdin="first\nsecond\n")
    assert len(counts(result.err)) == 2
    assert len(re.findall(r"^dflashc: note: .*top-k 0", result.err, re.MULTILINE)) == 1


@pytest.mark.slow
def test_drafts_that_are_hardly_ever_accepted_are_warned_of(dflashc: Here, pycode_pair_artefact: Path) -> None:
    """Nothing foresees what is drawn at such a temperature; an answer may end before that is sure, then again."""
    options = ["run", pycode_pair_artefact, "--raw", "-p", PROMPT, "--temp", 100, "--top-p", 1, "--min-p", 0,
               "--max-tokens", 60, "--width", 2, "--seed"]
    warning = "dflashc: warning: hardly any draft is accepted"
    seed = next(seed for seed in range(20) if warning in dflashc(*options, seed).err)
    assert dflashc(*options, seed, "--quiet").err == ""


@pytest.mark.slow
def test_verbose_says_where_the_width_comes_from(dflashc: Here, pycode_pair_artefact: Path, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["-v", "run", pycode_pair_artefact, "-p", "x", "--temp", 0, "--max-tokens", 2]
    assert "never tuned on this machine; see `dflashc tune`" in dflashc(*options).err
    tuned = dflashc("tune", pycode_pair_artefact, "--ctx", 256, "--seconds", 0, "--max-tokens", 8)
    assert tuned.code == 0, tuned.err
    assert f"by the tuning record {tmp_path}" in dflashc(*options).err
    assert "draft width" not in dflashc(*options, "--width", 2).err


# conversations


def test_later_turns_find_earlier_ones_in_the_caches(pycode_artefact: Path) -> None:
    result = beside("run", pycode_artefact, "--chat", "--temp", 0, "--max-tokens", 8, "--system", "Be brief.",
                    stdin="first\n\nsecond\nthird\n")
    assert result.code == 0, result.err
    turns = counts(result.err)
    assert len(turns) == 3, "an empty line is no turn"
    for before, after in pairwise(turns):
        assert int(after[1]) >= int(before[0]), "at least the whole prompt of the turn before"
        assert int(after[0]) > int(after[1])
    assert turns[0][1] == "0"


def test_a_model_without_template_cannot_converse(dflashc: Here, without_template: Path, continuation: str) -> None:
    message = dflashc.error(2, "run", without_template, "--chat")
    assert message == "this model has no chat template; use -p to have it continue a text"
    assert "--system needs a chat template" in dflashc.error(2, "run", without_template, "-p", "x", "--system", "y")
    plain = dflashc("run", without_template, "-p", PROMPT, "--temp", 0, "--max-tokens", 24)
    assert plain.out == continuation + "\n", "without template, -p continues the text"


def test_a_turn_that_does_not_fit_ends_a_conversation_that_nobody_types(pycode_artefact: Path) -> None:
    result = beside("run", pycode_artefact, "--chat", "--max-tokens", 1, stdin="x " * 3000 + "\n")
    assert result.code == 2
    assert result.err.count("\n") == 1


# interrupts


def run_slowly(pycode_artefact: Path, *options: str) -> subprocess.Popen[bytes]:
    """A generation that takes its time: it goes on until the context is full, and nobody stops it."""
    return subprocess.Popen([*COMMAND, "run", str(pycode_artefact), *options, "--temp", "1.5", "--top-k", "0"],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_an_interrupt_ends_the_answer_with_its_statistics(pycode_artefact: Path) -> None:
    # End tokens are common at this temperature, so the answer may end by itself before the signal comes: then again.
    for _ in range(20):
        process = run_slowly(pycode_artefact, "--raw", "-p", PROMPT)
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        if process.returncode == 130:
            break
    assert first
    assert counts(err.decode())[0][3] == "cancelled"
    assert b"Traceback" not in err


def test_an_interrupt_is_heard_between_parts_of_a_prompt(dflashc: Here, pycode_artefact: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Session.decode

    def decode_while_somebody_types(session: Session, *arguments: Any) -> None:
        decode(session, *arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Session, "decode", decode_while_somebody_types)
    result = dflashc("run", pycode_artefact, "--raw", "-p", "x = 1\n" * 150)
    assert (result.code, result.out) == (130, "\n")
    assert [(generated, finish) for _, _, generated, finish in counts(result.err)] == [("0", "cancelled")]


def read_until(terminal: int, pattern: bytes) -> bytes:
    """What a terminal shows up to `pattern`."""
    seen = b""
    while not re.search(pattern, seen):
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, seen
        seen += os.read(terminal, 4096)
    return seen


def test_at_the_prompt_an_interrupt_leaves(pycode_artefact: Path) -> None:
    mine, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, "run", str(pycode_artefact), "--chat", "--max-tokens", "4"], stdin=theirs,
                               stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    read_until(mine, rb"> $")
    os.write(mine, b"hello\n")
    seen = read_until(mine, rb"finish: \w+\][^>]*> $")
    assert b"Traceback" not in seen
    assert interrupt_until_it_ends(process) == 0
    os.close(mine)


def interrupt_until_it_ends(process: subprocess.Popen[bytes]) -> int:
    """Press Ctrl-C as a user does: again, when nothing happened.

    Python's `input` notices a signal that comes just before its blocking read only with the next one.
    """
    for _ in range(30):
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the program did not end")


def test_run_loads_neither_compiler_nor_tvm(pycode_artefact: Path) -> None:
    script = f"""
import sys
from dflashc.compiler.cli import main
try:
    main(["run", {str(pycode_artefact)!r}, "-p", "x", "--max-tokens", "2", "-q"])
except SystemExit as ended:
    assert ended.code == 0
own = ("dflashc.compiler.", "dflashc.targets", "dflashc.passes")
heavy = ("tvm", "tvm_ffi", "gguf", "rich")
print("loaded:", sorted(m for m in sys.modules if m.startswith(own) or m.partition(".")[0] in heavy))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "loaded: ['dflashc.compiler.cli', 'dflashc.compiler.cli_run']"
