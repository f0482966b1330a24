"""A conversation with a model: caches, committed tokens, prefill and decoding on one device.

Owns the decode loop, plain or in speculative rounds, and the prefix cache. Works in token ids; knows nothing of text,
templates or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.base import Device, Replay
from dflashc.runtime.device.memories import session_memories
from dflashc.runtime.device_sampling import refusal, sampling_words
from dflashc.runtime.errors import RequestError
from dflashc.runtime.rounds import HEADS, round_programs
from dflashc.runtime.sampling import SamplingParameters, sample
from dflashc.runtime.width import WidthController


@dataclass
class Statistics:
    """What a generation did. Times in seconds; `cached` are prompt tokens that were already in the caches.

    Attributes
    ----------
    rounds : int
        Passes of the target after prefill.
    drafted, accepted : int
        Proposals that were verified, and those that were kept (llama.cpp's draft_n and draft_n_accepted).
    reached : list of int
        Per position 1.. of a proposal: rounds in which it was kept, out of `offered` rounds in which it was made.
    round_seconds : dict
        By width, the time of every round; their sum is `decode_seconds`.
    """

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    round_seconds: dict[int, list[float]] = field(default_factory=dict)

    def count_round(self, width: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += width
        self.accepted += accepted
        grow = width - len(self.offered)
        self.offered += [0] * grow
        self.reached += [0] * grow
        for position in range(width):
            self.offered[position] += 1
            self.reached[position] += position < accepted

    def time_round(self, width: int, seconds: float) -> None:
        self.decode_seconds += seconds
        self.round_seconds.setdefault(width, []).append(seconds)


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
    most_width : int
        Widest draft; 0 without a drafter.
    notes : list of str
        What the user should know of the requests so far, each once.
    """

    def __init__(self, artefact: Artefact, device: Device[Any], context: int) -> None:
        manifest = artefact.manifest
        self._plan = artefact.plan
        self._device = device
        self.context = context
        self.vocabulary: int = manifest.config["vocabulary"]
        self._row_bytes: int = manifest.config["hidden"] * 4
        self.most_width: int = manifest.drafter.get("width", 0)
        self._block_rows: int = manifest.drafter.get("block_rows", 0)  # of every draft; 0: as many as are wanted
        self.tokens: list[int] = []
        self.statistics = Statistics()
        self.notes: list[str] = []
        self._memories: dict[str, Any] = session_memories(artefact, device, context)
        if self.most_width:
            block = np.full(self.most_width + 1, manifest.drafter["mask_id"], np.int32)
            device.upload(self._memories["block"], block)
        self._replays: dict[tuple[str, ...], Replay] = {}
        self._decode_rows = sorted((p.rows for p in self._plan.programs.values() if p.role == "decode"), reverse=True)
        # what the device's state block holds, so that a round uploads nothing
        self._device_state: tuple[int, int] | None = None
        self._device_anchor: int | None = None

    # One run ---------------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], head: str | None, first_row: int = 0, rows: int = 0) -> None:
        """Run the model over `tokens`, which become committed, in the drafter's caches too.

        Parameters
        ----------
        head : str or None
            "ids", "logits" or "draw": also run the output head over `rows` rows from `first_row` on.
        """
        self._require_room(len(tokens))
        self._set_length(first_row)
        self._device.upload(self._memories["tokens"], np.asarray(tokens, np.int32))
        self._upload_history(tokens)
        self._device_anchor = None
        m = len(tokens)
        inject = [f"inject.{m}"] if self.most_width else []
        heads = [f"{role}.{rows}" for role in HEADS[head]] if head else []
        self._replay(first_row, f"positions.{m}", f"decode.{m}", *inject, *heads).run()
        self.tokens.extend(tokens)

    def round(self, anchor: int, width: int, head: str = "ids") -> list[int]:
        """One round on the device: draft `width` proposals after `anchor`, verify, inject, accept.

        Returns the tokens after the anchor: the accepted proposals and the target's next token. The anchor and the
        accepted ones are committed.

        Parameters
        ----------
        head : str
            "ids" for the likeliest tokens, "draw" for those that the request's sampler draws. A proposal is kept when
            it is what was chosen (sample-and-match: lossless for every sampler).
        """
        self._verify(anchor, width, *HEADS[head], "inject", "accept")
        emitted = self._device.download(self._memories["emitted"], "int32", width + 2)
        accepted = int(emitted[0])
        after = [_chosen(t) for t in emitted[1 : accepted + 2]]
        self._commit(anchor, after, width)
        self._device_state, self._device_anchor = (len(self.tokens), 0), after[-1]
        return after

    def sampled_round(self, anchor: int, width: int, parameters: SamplingParameters) -> list[int]:
        """Like `round`, but the host draws the tokens, for samplers that the device does not have."""
        self._verify(anchor, width, "logits", "inject")
        proposals = self._device.download(self._memories["tokens"], "int32", width, offset=4)
        logits = self.logits(width + 1)
        history, after = [*self.tokens, anchor], []
        for row in range(width + 1):
            token = sample(logits[row], history, len(history), parameters)
            after.append(token)
            history.append(token)
            if row == width or token != proposals[row]:
                break
        self._upload_history([anchor, *after[:-1]])
        self._commit(anchor, after, width)
        return after

    def ids(self, rows: int) -> np.ndarray:
        """Token of each row of the last "ids" or "draw" head, int32 (rows,)."""
        return self._device.download(self._memories["ids"], "int32", rows)

    def logits(self, rows: int) -> np.ndarray:
        """Logits of the last "logits" head, float32 (rows, vocabulary)."""
        flat = self._device.download(self._memories["logits"], "float32", rows * self.vocabulary)
        return flat.reshape(rows, self.vocabulary)

    def rewind(self, length: int) -> None:
        """Forget all tokens after the first `length`, for target and drafter."""
        del self.tokens[length:]

    # Timing ----------------------------------------------------------------------------------------------------

    def rehearse(self, depth: int) -> None:
        """Act as if `depth` tokens were committed, with noise in the caches: to time rounds without their text.

        Rewind to 0 before the session is used for text.
        """
        self.rewind(0)
        self._require_room(depth)
        noise = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float16).view(np.uint8)
        for name, buffer in self._plan.buffers.items():
            if buffer.role == "cache":
                for offset in range(0, buffer.size(depth), noise.size):
                    self._device.upload(self._memories[name], noise[: buffer.size(depth) - offset], offset)
        self.tokens += [0] * depth

    def time(self, width: int, *roles: str) -> float:
        """Seconds of those programs of a greedy round that have one of `roles`, 0 where none does.

        They run at the present depth, and nothing is committed.
        """
        ending = ("ids", "inject", "accept") if self.most_width else ("ids", "accept")
        round_ = round_programs(width, self._block_rows, *ending)
        programs = [name for name in round_ if name.partition(".")[0] in roles]
        if not programs:
            return 0.0
        self._set_length(0)
        self._device_anchor = None
        replay = self._replay(0, *programs)
        started = time.perf_counter()
        replay.run()
        return time.perf_counter() - started

    # A whole answer --------------------------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int], head: str, pause: Callable[[], None] = lambda: None) -> int:
        """Commit `prompt`, reusing the part the caches already hold, and run `head` over its last row.

        Returns the number of tokens reused. The last token is always run, for its head. Between parts of the prompt
        `pause` is called; it may raise to leave the rest.
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
            rows = next(r for r in self._decode_rows if r <= rest)
            last = rows == rest
            self.decode(prompt[position : position + rows], head if last else None, rows - 1, 1)
            position += rows
            pause()
        return shared

    def generate(self, prompt: Sequence[int], parameters: SamplingParameters, limit: int,
                 stop: frozenset[int] = frozenset(), width: WidthController | None = None,
                 pause: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Yield tokens until one of `stop` (not yielded), `limit` tokens, or a full context.

        `width` chooses how many tokens are drafted per round; plain decoding without one. `pause` as in `prefill`.
        `statistics` holds the counters of the last call. The caches never hold more than what was yielded, wherever
        the consumer stops.
        """
        self.statistics = statistics = Statistics(prompt=len(prompt))
        head = self._choose_head(parameters)
        started = time.perf_counter()
        statistics.cached = self.prefill(prompt, head, pause)
        if head == "logits":
            token = sample(self.logits(1)[0], self.tokens, len(self.tokens), parameters)
        else:
            token = _chosen(self.ids(1)[0])
        statistics.prefill_seconds = time.perf_counter() - started
        pending = [token]
        while True:
            base = len(self.tokens) - (len(pending) - 1)  # committed tokens, should none of `pending` be yielded
            yielded = 0
            try:
                for token in pending:
                    if token in stop or statistics.generated == limit:
                        return
                    statistics.generated += 1
                    yielded += 1
                    yield token
            finally:
                self.rewind(min(len(self.tokens), base + yielded))
            room = min(limit - statistics.generated - 1, self.context - len(self.tokens) - 1)
            if room < 0:
                return
            started = time.perf_counter()
            chosen = min(width.choose(len(self.tokens)), room, self.most_width) if width else 0
            if self._block_rows > self.context - len(self.tokens):
                chosen = 0  # the whole block must fit
            if head == "logits":
                pending = self.sampled_round(token, chosen, parameters)
            else:
                pending = self.round(token, chosen, head)
            seconds = time.perf_counter() - started
            statistics.time_round(chosen, seconds)
            if width:
                width.record(chosen, len(pending) - 1, seconds)

    def _choose_head(self, parameters: SamplingParameters) -> str:
        """How a request's tokens come about: "ids"; "draw", with the device's sampler set up; or "logits" for the host.
        """
        if parameters.is_plain_argmax:
            return "ids"
        note = refusal(parameters, self.vocabulary)
        if note is None:
            self._device.upload(self._memories["sampling"], sampling_words(parameters, self.vocabulary))
            return "draw"
        if note not in self.notes:
            self.notes.append(note)
        return "logits"

    def _verify(self, anchor: int, width: int, *roles: str) -> None:
        """Draft `width` proposals, run the target over them and the anchor, and then the programs of `roles`."""
        self._require_room(max(width + 1, self._block_rows if width else 0))
        self._set_length()
        self._set_anchor(anchor)
        roles = tuple(role for role in roles if role != "inject" or self.most_width)
        self._replay(0, *round_programs(width, self._block_rows, *roles)).run()

    def _commit(self, anchor: int, after: list[int], width: int) -> None:
        self.tokens += [anchor, *after[:-1]]
        self.statistics.count_round(width, len(after) - 1)

    def _require_room(self, count: int) -> None:
        if len(self.tokens) + count > self.context:
            raise RequestError(f"the context is full: {len(self.tokens)} tokens and {count} more do not fit "
                               f"{self.context}; use a larger --ctx or a shorter prompt")

    def _set_length(self, first_row: int = 0) -> None:
        """Tell the device the length, and which row of the run is the head's first."""
        state = (len(self.tokens), first_row)
        if self._device_state != state:
            self._device.upload(self._memories["state"], np.array(state, np.int64))
        self._device_state = None  # until a run that keeps it in step says otherwise

    def _set_anchor(self, anchor: int) -> None:
        if self._device_anchor != anchor:
            first = np.array([anchor], np.int32)
            self._device.upload(self._memories["tokens"], first)
            self._device.upload(self._memories["block"], first)
        self._device_anchor = None

    def _upload_history(self, tokens: Sequence[int]) -> None:
        """Write tokens that are about to be committed to the device's history."""
        self._device.upload(self._memories["history"], np.asarray(tokens, np.int32), offset=4 * len(self.tokens))

    def _replay(self, first_row: int, *programs: str) -> Replay:
        """The recorded run of `programs`, in order; heads read the residual stream from `first_row` on."""
        key = (str(first_row), *programs)
        if key not in self._replays:
            memories = dict(self._memories)
            memories["hidden"] = self._memories["residual"].view(first_row * self._row_bytes)
            launches = [x for name in programs for x in self._plan.programs[name].launches]
            self._replays[key] = self._device.record(launches, memories, self.context)
        return self._replays[key]


def _chosen(token: Any) -> int:
    """A token that the device chose; it says -1 where the logits are broken."""
    if token < 0:
        raise RequestError("the model's largest logit is not finite: its weights or the input are broken")
    return int(token)
