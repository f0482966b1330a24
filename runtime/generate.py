"""Text in, text out: an opened artefact with its tokenizer and chat template, and generation on a session.

Owns what the user sees: stop strings, the budget, the reason for the end. Knows nothing of terminals or HTTP, and
leaves the decode loop to `session`.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dflashc.runtime import tuning
from dflashc.runtime.artefact import Artefact, load_artefact
from dflashc.runtime.detokenizer import TextStream
from dflashc.runtime.device.base import Device
from dflashc.runtime.device.opening import open_device
from dflashc.runtime.drafting import DraftParameters
from dflashc.runtime.errors import RequestError
from dflashc.runtime.plan import CONTEXT_STEP
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session
from dflashc.runtime.statistics import Statistics
from dflashc.runtime.tokenizer import Tokenizer
from dflashc.runtime.width import WidthController

if TYPE_CHECKING:
    from dflashc.runtime.template import ChatTemplate

DEFAULT_CONTEXT = 4096

Messages = Sequence[Mapping[str, Any]]


class Model:
    """An opened artefact: what sessions are made from and prompts are encoded with. A context manager that closes it.

    Attributes
    ----------
    load_seconds : float
        Time it took to open.
    """

    def __init__(self, artefact: Artefact, tokenizer: Tokenizer, device: Device, load_seconds: float = 0.0) -> None:
        self.artefact = artefact
        self.tokenizer = tokenizer
        self.device = device
        self.load_seconds = load_seconds

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, None where the model has none."""
        source = self.tokenizer.chat_templates.get("default")
        if source is None:
            return None
        from dflashc.runtime.template import ChatTemplate

        names = (self.tokenizer.token_text(self.tokenizer.bos_id), self.tokenizer.token_text(self.tokenizer.eos_id))
        return ChatTemplate(source, *names)

    def encode(self, prompt: str | Messages, *, parse_special: bool = False, **variables: Any) -> list[int]:
        """Token ids of a text to continue, or of a conversation to answer.

        Parameters
        ----------
        parse_special : read control tokens written in a text as what they name; in a conversation they always are,
            since templates write them.
        variables : arguments of `ChatTemplate.render`.

        Raises
        ------
        RequestError
            A conversation, and the model has no chat template; or the template refuses it.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=parse_special)
        if self.template is None:
            raise RequestError("this model has no chat template; give it a text to continue")
        ids = self.tokenizer.encode(self.template.render(prompt, **variables), parse_special=True)
        begin = self.tokenizer.bos_id
        if begin is not None and ids[:2] == [begin, begin]:  # from the tokenizer, and from the template
            del ids[0]
        return ids

    def choose_context(self, asked: int | None = None, needed: int = 0) -> int:
        """Capacity for a session, in tokens: whole steps of 256, at most what the artefact was built for.

        Parameters
        ----------
        asked : what the user wants; None for `DEFAULT_CONTEXT`, or `needed` where that is more.
        """
        if asked is not None and asked < 1:
            raise RequestError(f"a context of {asked} tokens was asked for; expected at least 1")
        wanted = max(DEFAULT_CONTEXT, needed) if asked is None else asked
        return min(-(-wanted // CONTEXT_STEP) * CONTEXT_STEP, self.artefact.plan.max_context)

    def generator(self, context: int) -> Generator:
        """A generator with a session of its own of `context` tokens."""
        return Generator(Session(self.artefact, self.device, context), self.tokenizer)

    def close(self) -> None:
        """Close the device; sessions of this model must not be used afterwards."""
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load(directory: Path, threads: int | None = None, gpu: str | None = None, allow_ptx: bool = False) -> Model:
    """Open an artefact that this machine can run; parameters and errors as of `open_device`.

    Kernels are those that the tuning record of this device chose, if there is one.
    """
    started = time.perf_counter()
    artefact = load_artefact(directory)
    tokenizer = Tokenizer.load(directory / "tokenizer")
    device = open_device(artefact, threads=threads, gpu=gpu, allow_ptx=allow_ptx)
    record, _ = tuning.find(artefact, device)
    if record is not None:
        artefact = tuning.with_kernels(artefact, record.kernels)
    return Model(artefact, tokenizer, device, time.perf_counter() - started)


@dataclass(frozen=True)
class Report:
    """How a generation went.

    Attributes
    ----------
    finish : str
        "stop" (the model ended, or a stop string came), "length" (the budget), "context" (it is full), "cancelled"
        (the consumer took no more).
    stop : str or None
        The stop string that was found.
    decoded : int
        Tokens that `statistics.decode_seconds` were spent on; the first one generated comes with the prompt.
    """

    statistics: Statistics
    finish: str
    stop: str | None
    decoded: int

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens per second, those found in the caches left out; 0 where nothing was timed."""
        return _speed(self.statistics.prompt - self.statistics.cached, self.statistics.prefill_seconds)

    @property
    def decode_speed(self) -> float:
        """Generated tokens per second; 0 where nothing was timed."""
        return _speed(self.decoded, self.statistics.decode_seconds)


class Generator:
    """Streams text from a session.

    Attributes
    ----------
    report : Report or None
        Of the last generation, once it has ended.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer) -> None:
        self.session = session
        self.report: Report | None = None
        self._tokenizer = tokenizer

    def generate(self, prompt: Sequence[int], parameters: SamplingParameters, *, max_tokens: int | None = None,
                 stops: Sequence[str] = (), skip_special: bool = True, width: WidthController | None = None,
                 pause: Callable[[], None] = lambda: None,
                 drafting: DraftParameters | None = None) -> abc.Generator[str, None, None]:
        """Yield the text that each token completes, which may be empty; closing the iterator cancels.

        Afterwards the session holds what was shown: tokens beyond, e.g. those of a stop string, are forgotten, and a
        prompt that goes on from the shown text finds all of it in the caches.

        Parameters
        ----------
        prompt : token ids.
        max_tokens : budget; None goes on until the model ends or the context is full.
        stops : stop strings; neither they nor anything behind them is shown.
        skip_special : leave control tokens out of the text.
        width : how many tokens to draft per round; None generates plainly.
        pause : called between parts of the prompt; it may raise to cancel.
        drafting : how proposals are accepted and cut.
        """
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}, expected at least 1")
        limit = max_tokens or self.session.context + 1  # the context ends it first
        stream = TextStream(self._tokenizer, stops, skip_special=skip_special)
        generated: list[int] = []
        shown = 0  # characters
        finish, stop = "cancelled", None
        self.report = None
        try:
            for token in self.session.generate(prompt, parameters, limit, self._tokenizer.end_of_generation_ids, width,
                                               pause, drafting):
                generated.append(token)
                output = stream.push((token,))
                shown += len(output.text)
                if output.stop is not None:
                    finish, stop = "stop", output.stop
                yield output.text
                if stop is not None:
                    return
            output = stream.flush()
            shown += len(output.text)
            stop = output.stop
            finish = "stop" if stop is not None else self._reason(prompt, generated, limit)
            yield output.text
        finally:
            decoded = max(0, len(self.session.tokens) - len(prompt))
            self.report = Report(self.session.statistics, finish, stop, decoded)
            while generated and len(self._tokenizer.decode(generated, skip_special=skip_special)) > shown:
                generated.pop()  # its text was not shown whole
            self.session.rewind(len(prompt) + len(generated))

    def _reason(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> str:
        """Why the session ended by itself. A token that ends the text is computed behind the last one, not given."""
        if len(self.session.tokens) == len(prompt) + len(generated):
            return "stop"
        return "length" if len(generated) == limit else "context"


def _speed(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
