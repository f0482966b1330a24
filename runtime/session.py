"""A conversation with a model: caches, committed tokens, prefill and decoding on one device.

Owns the decode loop, plain or in speculative rounds, and the prefix cache. Works in token ids; knows nothing of text,
templates or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dflashc.runtime.artefact import CONFIDENCE, Artefact
from dflashc.runtime.device.base import Device, Replay
from dflashc.runtime.device.memories import session_memories
from dflashc.runtime.device_sampling import Word, refusal, sampling_words
from dflashc.runtime.drafting import DraftParameters
from dflashc.runtime.errors import RequestError
from dflashc.runtime.phases import PhaseClock
from dflashc.runtime.rings import Rings
from dflashc.runtime.rounds import HEADS, draft_programs, round_programs, verify_programs, weighing
from dflashc.runtime.sampling import SamplingParameters, sample
from dflashc.runtime.statistics import Statistics
from dflashc.runtime.width import WidthController


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
        self._candidates: int = manifest.drafter.get("candidates", 0)  # tokens that the drafter gives probabilities
        self.tokens: list[int] = []
        self.statistics = Statistics()
        self.notes: list[str] = []
        self._memories: dict[str, Any] = session_memories(artefact, device, context)
        if self.most_width:
            block = np.full(self.most_width + 1, manifest.drafter["mask_id"], np.int32)
            device.upload(self._memories["block"], block)
        self._rings = Rings.of(self._plan.buffers.values())
        self._replays: dict[tuple[str, ...], Replay] = {}
        self._clock = PhaseClock()
        self._decode_rows = sorted((p.rows for p in self._plan.programs.values() if p.role == "decode"), reverse=True)
        # what the device's state block holds, so that a round uploads nothing
        self._device_state: tuple[int, int] | None = None
        self._device_anchor: int | None = None
        self._device_draft_temperature = 0.0
        self._draft_temperature = 0.0  # of the request

    # One run ---------------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], head: str | None, first_row: int = 0, rows: int = 0) -> None:
        """Run the model over `tokens`, which become committed, in the drafter's caches too.

        Parameters
        ----------
        head : str or None
            "ids", "logits" or "draw": also run the output head over `rows` rows from `first_row` on.
        """
        self._recall(draft=False)
        self._require_room(len(tokens))
        self._set_length(first_row)
        self._device.upload(self._memories["tokens"], np.asarray(tokens, np.int32))
        self._upload_history(tokens, len(self.tokens))
        self._device_anchor = None
        m = len(tokens)
        inject = [f"inject.{m}"] if self.most_width else []
        heads = [f"{role}.{rows}" for role in HEADS[head]] if head else []
        self._rings.store(len(self.tokens), m)
        self._replay(first_row, f"positions.{m}", f"decode.{m}", *inject, *heads).run()
        self.tokens.extend(tokens)

    def round(self, anchor: int, width: int, head: str = "ids", p_min: float = 0.0) -> list[int]:
        """One round on the device: draft `width` proposals after `anchor`, verify, inject, accept.

        Returns the tokens after the anchor: the accepted proposals and the target's next token. The anchor and the
        accepted ones are committed.

        Parameters
        ----------
        head : str
            "ids" for the likeliest tokens, "draw" for those of the request's sampler. A proposal is kept when it is
            what was chosen; how the sampler chooses, see `DraftParameters.accept`.
        p_min : float
            See `DraftParameters`. Above 0 the host looks at the draft before the target runs, over as many rows as are
            worth it: two waits instead of one.
        """
        temperature = self._draft_temperature if head == "draw" else 0.0
        proposed = self._verify(anchor, width, p_min, temperature, *HEADS[head], "inject", "accept")
        emitted = self._device.download(self._memories["emitted"], "int32", proposed + 2)
        accepted = int(emitted[0])
        after = [_chosen(t) for t in emitted[1 : accepted + 2]]
        self.tokens += [anchor, *after[:-1]]
        self.statistics.count_round(width, proposed, accepted)
        self._device_state, self._device_anchor = (len(self.tokens), 0), after[-1]
        return after

    def sampled_round(self, anchor: int, width: int, parameters: SamplingParameters, p_min: float = 0.0) -> list[int]:
        """Like `round`, but the host draws the tokens, for samplers that the device does not have."""
        proposed = self._verify(anchor, width, p_min, 0.0, "logits", "inject")
        proposals = self._device.download(self._memories["tokens"], "int32", proposed, offset=4).tolist()
        logits, committed, after = self.logits(proposed + 1), len(self.tokens), [anchor]
        try:
            for row, proposal in zip(logits, [*proposals, None], strict=True):
                self.tokens.append(after[-1])
                after.append(sample(row, self.tokens, len(self.tokens), parameters))
                if after[-1] != proposal:
                    break
        except BaseException:
            self.rewind(committed)
            raise
        self._upload_history(self.tokens[committed:], committed)
        self.statistics.count_round(width, proposed, len(after) - 2)
        return after[1:]

    def ids(self, rows: int) -> np.ndarray:
        """Token of each row of the last "ids" or "draw" head, int32 (rows,)."""
        return self._device.download(self._memories["ids"], "int32", rows)

    def logits(self, rows: int) -> np.ndarray:
        """Logits of the last "logits" head, float32 (rows, vocabulary)."""
        flat = self._device.download(self._memories["logits"], "float32", rows * self.vocabulary)
        return flat.reshape(rows, self.vocabulary)

    def rewind(self, length: int) -> None:
        """Forget all tokens after the first `length`, for target and drafter.

        Where a ring has overwritten what their windows show, the next run begins with some of them again.
        """
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
        self._rings.store(0, depth)
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
        self._rings.store(len(self.tokens), self._round_rows(width))
        replay = self._replay(0, *programs)
        started = time.perf_counter()
        replay.run()
        return time.perf_counter() - started

    # A whole answer --------------------------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int], head: str, pause: Callable[[], None] = lambda: None) -> int:
        """Commit `prompt`, reusing the part the caches still hold, and run `head` over its last row.

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
        start = self._rings.resume(shared, len(prompt))
        self.rewind(start)
        self._decode_all(prompt[start:], head, pause)
        return start

    def generate(self, prompt: Sequence[int], parameters: SamplingParameters, limit: int,
                 stop: frozenset[int] = frozenset(), width: WidthController | None = None,
                 pause: Callable[[], None] = lambda: None, drafting: DraftParameters | None = None) -> Iterator[int]:
        """Yield tokens until one of `stop` (not yielded), `limit` tokens, or a full context.

        `width` chooses how many tokens are drafted per round; plain decoding without one. `pause` as in `prefill`.
        `statistics` holds the counters of the last call. The caches never hold more than what was yielded, wherever
        the consumer stops.
        """
        self.statistics = statistics = Statistics(prompt=len(prompt))
        drafting = drafting or DraftParameters()
        head = self._choose_head(parameters, drafting)
        started = time.perf_counter()
        statistics.cached = self.prefill(prompt, head, pause)
        if head == "logits":
            token = sample(self.logits(1)[0], self.tokens, len(self.tokens), parameters)
        else:
            token = _chosen(self.ids(1)[0])
        statistics.prefill_seconds = time.perf_counter() - started
        self._clock.start()
        try:
            yield from self._answer(token, head, parameters, drafting, limit, stop, width)
        finally:
            statistics.phase_seconds = self._clock.seconds(statistics)

    def _answer(self, token: int, head: str, parameters: SamplingParameters, drafting: DraftParameters, limit: int,
                stop: frozenset[int], width: WidthController | None) -> Iterator[int]:
        """`generate` from the first token on, which the prompt leads to."""
        statistics, pending = self.statistics, [token]
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
                pending = self.sampled_round(token, chosen, parameters, drafting.p_min)
            else:
                pending = self.round(token, chosen, head, drafting.p_min)
            seconds = time.perf_counter() - started
            statistics.time_round(chosen, seconds)
            if width:  # what was cut counts as not kept, which makes the tokens of a width right
                width.record(chosen, len(pending) - 1, seconds)

    def _choose_head(self, parameters: SamplingParameters, drafting: DraftParameters) -> str:
        """How a request's tokens come about: "ids"; "draw", with the device's sampler set up; or "logits" for the host.
        """
        if parameters.is_plain_argmax:
            return "ids"
        reason, wanted = refusal(parameters, self.vocabulary), drafting.temperature(parameters, self._candidates)
        self._draft_temperature = 0.0 if reason else wanted
        if self.most_width:
            self.statistics.rule = "reject" if self._draft_temperature else "match"
            if drafting.accept == "reject" and not self._candidates:
                self._note("proposals are accepted by matching: this drafter gives them no probabilities")
        if reason:
            self._note(reason + ("; proposals are accepted by matching" if wanted else ""))
            return "logits"
        words = sampling_words(parameters, self.vocabulary, self._draft_temperature)
        self._device.upload(self._memories["sampling"], words)
        self._device_draft_temperature = self._draft_temperature
        return "draw"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _verify(self, anchor: int, width: int, p_min: float, draft_temperature: float, *roles: str) -> int:
        """Draft `width` proposals, run the target over the anchor and those that are worth it, then `roles`.

        Returns how many are worth it: all, or those before the first one of less confidence than `p_min`.
        """
        self._recall(draft=width > 0)
        self._require_room(self._round_rows(width))
        self._set_length()
        self._set_anchor(anchor)
        self._set_draft_temperature(draft_temperature)
        roles = tuple(role for role in roles if role != "inject" or self.most_width)
        self._rings.store(len(self.tokens), self._round_rows(width))
        if not width or not p_min:
            self._run(round_programs(width, self._block_rows, *roles))
            return width
        self._run(draft_programs(width, self._block_rows, weighing(self._candidates)))
        confidence = self._device.download(self._memories[CONFIDENCE], "float32", width)
        unsure = np.flatnonzero(~(confidence >= p_min))  # no number is unsure too
        proposed = int(unsure[0]) if unsure.size else width
        self._run(verify_programs(proposed, *roles))
        return proposed

    def _run(self, programs: Sequence[str]) -> None:
        """Run programs of a round."""
        started = time.perf_counter()
        replay = self._replay(0, *programs)
        recorded = time.perf_counter()
        replay.run()
        self.statistics.record_seconds += recorded - started
        self.statistics.device_seconds += time.perf_counter() - recorded

    def _round_rows(self, width: int) -> int:
        """Rows that a round stores, of a block or to verify."""
        return max(width + 1, self._block_rows if width else 0)

    def _decode_all(self, tokens: Sequence[int], head: str | None, pause: Callable[[], None]) -> None:
        """`decode` in as few runs as there are programs for, with `head` over the last row."""
        position = 0
        while position < len(tokens):
            rest = len(tokens) - position
            rows = next(r for r in self._decode_rows if r <= rest)
            self.decode(tokens[position : position + rows], head if rows == rest else None, rows - 1, 1)
            position += rows
            pause()

    def _recall(self, draft: bool) -> None:
        """Run those tokens again that the rings have lost and the next run sees, the drafter's too for a `draft`."""
        length = len(self.tokens)
        start = self._rings.resume(length, length, draft)
        if start < length:
            lost = self.tokens[start:]
            self.rewind(start)
            self._decode_all(lost, None, lambda: None)

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

    def _set_draft_temperature(self, temperature: float) -> None:
        """Tell the device how proposals are drawn."""
        if self._device_draft_temperature != temperature:
            self._device.upload(self._memories["sampling"], np.array([temperature]), offset=8 * Word.DRAFT_TEMPERATURE)
        self._device_draft_temperature = temperature

    def _upload_history(self, tokens: Sequence[int], position: int) -> None:
        """Write committed tokens, the first at `position`, to the device's history."""
        self._device.upload(self._memories["history"], np.asarray(tokens, np.int32), offset=4 * position)

    def _replay(self, first_row: int, *programs: str) -> Replay:
        """The recorded run of `programs`, in order; heads read the residual stream from `first_row` on."""
        key = (str(first_row), *programs)
        if key not in self._replays:
            memories = dict(self._memories)
            memories["hidden"] = self._memories["residual"].view(first_row * self._row_bytes)
            chosen = [self._plan.programs[name] for name in programs]
            self._replays[key] = self._device.record([x for p in chosen for x in p.launches], memories, self.context)
            self._clock.add(self._replays[key], chosen)
        return self._replays[key]


def _chosen(token: Any) -> int:
    """A token that the device chose; it says -1 where the logits are broken."""
    if token < 0:
        raise RequestError("the model's largest logit is not finite: its weights or the input are broken")
    return int(token)
