"""A process that measures an artefact on request; the counterpart of llama_decode.cpp, which states the requests.

Loads what `dflashc run` loads and imports nothing but the runtime, so that its time to the first token and its memory
are those of the product.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from dflashc.runtime.generate import load
from dflashc.runtime.session import Session


class Worker:
    """Sessions of one artefact, each at a depth."""

    def __init__(self, artefact: Path, threads: int) -> None:
        self._model = load(artefact, threads)
        self._sessions: dict[int, Session] = {}

    def open(self, depth: int, capacity: int) -> float:
        """Make a session and fill it with `depth` tokens; seconds of the filling."""
        session = Session(self._model.artefact, self._model.device, capacity)
        self._sessions[depth] = session
        started = time.perf_counter()
        if depth:
            session.prefill(self._tokens(0, depth), "logits")
        return time.perf_counter() - started

    def run(self, depth: int, rows: int, calls: int, head: str) -> float:
        """Decode `calls` batches of `rows` tokens and read what the head says of every row; seconds per batch."""
        session = self._sessions[depth]
        batches = [self._tokens(depth + call * rows, rows) for call in range(calls)]
        results = session.ids if head == "ids" else session.logits
        started = time.perf_counter()
        for batch in batches:
            session.decode(batch, head, 0, rows)
            results(rows)
        seconds = time.perf_counter() - started
        session.rewind(depth)
        return seconds / calls

    def prefill(self, rows: int, head: str) -> float:
        """Commit `rows` tokens at depth 0, with a head for the last; seconds."""
        session = self._sessions[0]
        tokens = self._tokens(0, rows)
        started = time.perf_counter()
        session.prefill(tokens, head)
        seconds = time.perf_counter() - started
        session.rewind(0)
        return seconds

    def _tokens(self, position: int, count: int) -> list[int]:
        """Tokens spread over the vocabulary by a multiplicative generator, the same for both engines."""
        vocabulary = self._model.artefact.manifest.config["vocabulary"]
        return [i * 2654435761 % vocabulary for i in range(position, position + count)]


def answer(worker: object, request: str) -> float:
    """Do what a line asks for: the name of a method, and its arguments."""
    name, *words = request.split()
    arguments = [int(word) if word.isdigit() else word for word in words]
    return getattr(worker, name)(*arguments)


def serve(worker: object) -> None:
    """Answer the lines of standard input until it ends."""
    for line in sys.stdin:
        print(json.dumps(answer(worker, line)), flush=True)


def main() -> None:
    """Serve an artefact."""
    serve(Worker(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
