"""A conversation with a model: caches, committed tokens, prefill and decoding on one device.

Owns the decode loop and the prefix cache. Works in token ids; knows nothing of text, templates or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.base import Device, Memory, Replay
from dflashc.runtime.errors import RequestError
from dflashc.runtime.plan import Launch
from dflashc.runtime.sampling import SamplingParameters, sample


@dataclass
class Statistics:
    """What a generation did. Times in seconds; `cached` are prompt tokens that were already in the caches."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class Session:
    """One sequence of tokens on a device.

    Parameters
    ----------
    context : int
        Capacity of the caches in tokens; at most the plan's, a multiple of 256.

    Attributes
    ----------
    tokens : list of int
        Tokens whose K and V are in the caches; n of the state block is their number.
    """

    def __init__(self, artefact: Artefact, device: Device, context: int) -> None:
        self._plan = artefact.plan
        self._device = device
        self.context = context
        self.vocabulary: int = artefact.manifest.config["vocabulary"]
        self._hidden: int = artefact.manifest.config["hidden"]
        self.tokens: list[int] = []
        self._memories: dict[str, Memory] = {
            name: device.alloc(buffer.size(context)) for name, buffer in self._plan.buffers.items()
            if buffer.role != "view"}
        weights = device.map_file(artefact.weights)
        for weight in artefact.manifest.weights:
            self._memories[weight.name] = weights.view(weight.offset, weight.bytes)
        # by (decode rows, head program or None, residual row the head starts at)
        self._replays: dict[tuple[int, str | None, int], Replay] = {}
        self.statistics = Statistics()
        self._prefill_rows = sorted((p.rows for p in self._plan.programs.values() if p.role == "decode"), reverse=True)

    def decode(self, tokens: Sequence[int], head: str | None, first_row: int = 0, rows: int = 0) -> None:
        """Run the model over `tokens`, which become committed.

        Parameters
        ----------
        head : str or None
            "ids" or "logits": also run the output head over `rows` rows from `first_row` on.
        """
        n, m = len(self.tokens), len(tokens)
        if n + m > self.context:
            raise RequestError(f"the context is full: {n} tokens and {m} more do not fit {self.context}; use a larger "
                               "--ctx or a shorter prompt")
        self._device.upload(self._memories["tokens"], np.asarray(tokens, np.int32))
        self._device.upload(self._memories["state"], np.array([n], np.int64))
        self._replay(m, f"{head}.{rows}" if head else None, first_row).run()
        self.tokens.extend(tokens)

    def ids(self, rows: int) -> np.ndarray:
        """Arg-max token of each row of the last "ids" head, int32 (rows,)."""
        return self._device.download(self._memories["ids"], "int32", rows)

    def logits(self, rows: int) -> np.ndarray:
        """Logits of the last "logits" head, float32 (rows, vocabulary)."""
        flat = self._device.download(self._memories["logits"], "float32", rows * self.vocabulary)
        return flat.reshape(rows, self.vocabulary)

    def rewind(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        del self.tokens[length:]

    def prefill(self, prompt: Sequence[int], head: str) -> int:
        """Commit `prompt`, reusing the part the caches already hold, and run `head` over its last row.

        Returns the number of tokens reused. The last token is always run, for its head.
        """
        if not prompt:
            raise RequestError("the prompt is empty; expected at least one token")
        if not all(0 <= t < self.vocabulary for t in prompt):
            raise RequestError(f"the prompt has a token outside the vocabulary of {self.vocabulary}")
        if len(prompt) > self.context:
            raise RequestError(f"the prompt has {len(prompt)} tokens, the context {self.context}; use a larger --ctx")
        shared = 0
        for old, new in zip(self.tokens, prompt[:-1], strict=False):
            if old != new:
                break
            shared += 1
        self.rewind(shared)
        position = shared
        while position < len(prompt):
            rest = len(prompt) - position
            rows = next(r for r in self._prefill_rows if r <= rest)
            last = rows == rest
            self.decode(prompt[position : position + rows], head if last else None, rows - 1, 1)
            position += rows
        return shared

    def generate(self, prompt: Sequence[int], parameters: SamplingParameters, limit: int,
                 stop: frozenset[int] = frozenset()) -> Iterator[int]:
        """Yield tokens until one of `stop` (not yielded), `limit` tokens, or a full context.

        `statistics` holds the counters of the last call. A token is committed when the next one is computed, so a
        consumer that stops leaves the caches at what it has seen.
        """
        self.statistics = statistics = Statistics(prompt=len(prompt))
        head = "ids" if parameters.is_plain_argmax else "logits"
        started = time.perf_counter()
        statistics.cached = self.prefill(prompt, head)
        statistics.prefill_seconds = time.perf_counter() - started
        while statistics.generated < limit:
            if head == "ids":
                token = int(self.ids(1)[0])
            else:
                token = sample(self.logits(1)[0], self.tokens, len(self.tokens), parameters)
            if token in stop:
                return
            statistics.generated += 1
            yield token
            if statistics.generated == limit or len(self.tokens) == self.context:
                return
            started = time.perf_counter()
            self.decode([token], head, 0, 1)
            statistics.decode_seconds += time.perf_counter() - started

    def _replay(self, rows: int, head: str | None, first_row: int) -> Replay:
        key = (rows, head, first_row)
        if key not in self._replays:
            launches: list[Launch] = list(self._plan.programs[f"decode.{rows}"].launches)
            memories = dict(self._memories)
            if head is not None:
                start = first_row * self._hidden * 4
                memories["hidden"] = self._memories["residual"].view(start)
                launches += self._plan.programs[head].launches
            self._replays[key] = self._device.record(launches, memories, self.context)
        return self._replays[key]
