"""A process that generates in rounds with an artefact, on request; the counterpart of `llama_server.LlamaServer`.

Generates as `dflashc run` does, and counts the time from the first token on, all that Python does included.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.worker import serve
from dflashc.runtime.generate import load
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.width import FixedWidth

_GREEDY = SamplingParameters(temperature=0.0)


class RoundWorker:
    """A session that goes on from given prompts.

    Parameters
    ----------
    prompts : list of list of int
        Every request generates after each of them.
    """

    def __init__(self, artefact: Path, threads: int, context: int, prompts: list[list[int]]) -> None:
        self._session = load(artefact, threads).generator(context).session
        self._prompts = prompts

    def rounds(self, width: int, tokens: int) -> float:
        """Generate at least `tokens` tokens after every prompt; seconds per round."""
        seconds, rounds, _ = self._generate(width, tokens)
        return seconds / rounds

    def kept(self, width: int, tokens: int) -> float:
        """Tokens per round of the same."""
        _, rounds, committed = self._generate(width, tokens)
        return committed / rounds

    def _generate(self, width: int, tokens: int) -> tuple[float, int, int]:
        """Seconds, rounds and the tokens that came of them, over all prompts; no draft is cut short by the limit."""
        seconds, rounds, committed = 0.0, 0, 0
        for prompt in self._prompts:
            stream = self._session.generate(prompt, _GREEDY, tokens + width + 2, width=FixedWidth(width))
            next(stream)
            started = time.perf_counter()
            for _ in range(tokens):
                next(stream)
            seconds += time.perf_counter() - started
            statistics = self._session.statistics
            rounds += statistics.rounds
            committed += statistics.rounds + statistics.accepted
        return seconds, rounds, committed


def main() -> None:
    """Serve standard input until it ends."""
    artefact, threads, context, prompts = sys.argv[1:]
    serve(RoundWorker(Path(artefact), int(threads), int(context), json.loads(Path(prompts).read_text())))


if __name__ == "__main__":
    main()
