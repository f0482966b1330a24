"""llama.cpp's speculative decoding, which only its server has: one server for every width of drafts.

Owns how servers are started and how their own timings are read. Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.engines import Engine, PeerMissing

_PATIENCE = 120.0  # seconds until a server must have loaded its files
_SERVER = "llama-server"
_QUIET = ("--no-webui", "-lv", "0", "-np", "1", "-cram", "0", "-ctxcp", "0")  # one sequence, no copies of caches


def find_server(build: Path | None) -> Path:
    """The server of a build folder; raises `PeerMissing`."""
    if build is None:
        raise PeerMissing("--llama-cpp was not given")
    program = build / "bin" / _SERVER
    if not program.is_file():
        raise PeerMissing(f"{build} is no build folder of llama.cpp with its server: bin/{_SERVER} is missing")
    return program.resolve()


@dataclass(frozen=True)
class ServerOptions:
    """What all servers of a pair have in common.

    Attributes
    ----------
    prompts : list of list of int
        Every request generates after each of them.
    streamed : bool
        Take the timings as soon as the wanted tokens are there, before the end of the answer cuts drafts short. Costs
        some work per token, so it is for models where that is nothing.
    """

    program: Path
    target: Path
    drafter: Path
    threads: int
    context: int
    prompts: list[list[int]]
    streamed: bool


@dataclass(frozen=True)
class _Generated:
    """Rounds that followed the first token, and the tokens that came of them."""

    seconds: float
    rounds: int
    tokens: int


class LlamaServer(Engine):
    """A server that drafts `width` tokens per round; 0 starts it without the drafter."""

    def __init__(self, options: ServerOptions, width: int) -> None:
        self._options, self._width = options, width
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"http://127.0.0.1:{probe.getsockname()[1]}"
        port = self._address.rpartition(":")[2]
        draft = ["--spec-type", "draft-dflash", "-md", str(options.drafter), "--spec-draft-n-max", str(width)]
        self._command = [str(options.program), "-m", str(options.target), "-t", str(options.threads),
                         "-c", str(options.context), "--port", port, *_QUIET, *(draft if width else [])]
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        self._wait()

    def ask(self, request: str) -> float:
        """Answers "rounds WIDTH TOKENS" with seconds per round and "kept WIDTH TOKENS" with tokens per round."""
        name, _, tokens = request.split()
        found = [self._generate(prompt, int(tokens)) for prompt in self._options.prompts]
        rounds = sum(f.rounds for f in found)
        return sum(f.seconds for f in found) / rounds if name == "rounds" else sum(f.tokens for f in found) / rounds

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _wait(self) -> None:
        ends = time.monotonic() + _PATIENCE
        while time.monotonic() < ends and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.05)
        self.close()
        raise click.ClickException(f"{' '.join(self._command)} does not answer")

    def _generate(self, prompt: list[int], tokens: int) -> _Generated:
        streamed = self._options.streamed
        limit = tokens + (2 * self._width + 2 if streamed else 1)
        body = {"prompt": prompt, "n_predict": limit, "temperature": 0, "ignore_eos": True, "cache_prompt": True,
                "stream": streamed, "timings_per_token": streamed}
        request = urllib.request.Request(f"{self._address}/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                timings = _until(answer, tokens) if streamed else json.load(answer)["timings"]
        except (OSError, ValueError, KeyError) as error:
            raise click.ClickException(f"{' '.join(self._command)} failed: {error}") from error
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        # Within a round the counters are ahead of the tokens; at the end of an answer its limit cuts drafts short.
        rounds = drafted // self._width if streamed and self._width else timings["predicted_n"] - 1 - accepted
        return _Generated(timings["predicted_ms"] / 1e3, rounds, rounds + accepted)


class ByWidth(Engine):
    """Engines that answer as one: the second word of a request, the width of drafts, says which."""

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self._engines = engines

    def ask(self, request: str) -> float:
        """The answer of the width's engine."""
        return self._engines[int(request.split()[1])].ask(request)

    def waited(self) -> float:
        """Seconds that threads of any of them waited for a core."""
        return sum(engine.waited() for engine in set(self._engines.values()))

    def close(self) -> None:
        """End all processes."""
        for engine in set(self._engines.values()):
            engine.close()


def _until(lines: Iterable[bytes], tokens: int) -> dict[str, Any]:
    """The timings of a streamed answer when `tokens` tokens have followed the first."""
    for line in lines:
        if line.startswith(b"data: "):
            timings: dict[str, Any] = json.loads(line[6:])["timings"]
            if timings["predicted_n"] > tokens:
                return timings
    raise ValueError("the answer ended too early")
