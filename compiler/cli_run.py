"""`dflashc run` on a terminal: one answer, or a conversation turn by turn.

Owns the keyboard and what goes to which stream: text to standard output, everything else to standard error. Imports
nothing but the runtime.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from dflashc.runtime import speculation, tuning
from dflashc.runtime.choose_width import make_width
from dflashc.runtime.costs import CostTable
from dflashc.runtime.drafting import DraftParameters
from dflashc.runtime.errors import RequestError
from dflashc.runtime.generate import Generator, Model, Report, load
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.width import AutoWidth, Promise


@dataclass(frozen=True)
class RunOptions:
    """What the user asked for; see the options of `dflashc run`. `seeded` is whether the seed is the user's."""

    artefact: Path
    parameters: SamplingParameters
    seeded: bool
    drafting: DraftParameters
    system: str | None
    stops: tuple[str, ...]
    max_tokens: int | None
    context: int | None
    width: int | Literal["auto"]
    threads: int | None
    gpu: str | None
    allow_ptx: bool
    raw: bool
    parse_special: bool
    thinking: bool
    quiet: bool
    verbose: bool


def read_prompt(name: str) -> str:
    """The text of a file, or of standard input for "-", without the newline that editors put at its end."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8").removesuffix("\n")
    except OSError as error:
        raise RequestError(f"cannot read the prompt {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt {name} is not UTF-8: {error.reason} at byte {error.start}") from error


def answer(options: RunOptions, prompt: str) -> bool:
    """Print what the model says to `prompt`; False when the user interrupted it.

    The prompt is a message where the model has a chat template, unless the user asked for the raw text.
    """
    with load(options.artefact, options.threads, options.gpu, options.allow_ptx) as model:
        ids = _encode(model, options, prompt)
        answers = Answers(model, options, len(ids) + (options.max_tokens or 0))
        _, interrupted = answers.stream(ids)
        answers.report()
    return not interrupted


def _encode(model: Model, options: RunOptions, prompt: str) -> list[int]:
    """The ids of a single prompt."""
    if not options.raw and model.template is not None:
        messages = [*_system(options), {"role": "user", "content": prompt}]
        return model.encode(messages, enable_thinking=options.thinking)
    if options.system is not None:
        why = "--raw leaves it out" if options.raw else "this model has none"
        raise RequestError(f"--system needs a chat template; {why}")
    return model.encode(prompt, parse_special=options.parse_special)


def chat(options: RunOptions) -> None:
    """Answer the lines of standard input one after the other, until it ends or Ctrl-C comes at the prompt."""
    with load(options.artefact, options.threads, options.gpu, options.allow_ptx) as model:
        if model.template is None:
            raise RequestError("this model has no chat template; use -p to have it continue a text")
        answers = Answers(model, options, 0)
        messages = _system(options)
        for line in _lines():
            turn = [*messages, {"role": "user", "content": line}]
            try:
                text, _ = answers.stream(model.encode(turn, enable_thinking=options.thinking))
            except RequestError as error:
                if not sys.stdin.isatty():
                    raise
                print(f"dflashc: error: {error}", file=sys.stderr)  # the turn is dropped, the conversation goes on
                continue
            messages = [*turn, {"role": "assistant", "content": text}]
            answers.report()


def _system(options: RunOptions) -> list[dict[str, str]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


class Answers:
    """Answers of one session: their text on standard output, and what is to be said of them on standard error."""

    def __init__(self, model: Model, options: RunOptions, needed: int) -> None:
        self._model, self._options = model, options
        as_recorded = options.parameters.is_plain_argmax and not options.drafting.p_min
        self._width, notes = make_width(model.artefact, model.device, options.width, as_recorded=as_recorded)
        self._generator = _generator(model, options, needed)
        self._said = speculation.OnceOnly()
        if not options.quiet:
            _say(f"note: {text}" for text in model.device.notes)
        if options.verbose:
            _say(notes)

    def stream(self, ids: list[int]) -> tuple[str, bool]:
        """Print an answer as it comes; returns it, and whether Ctrl-C ended it."""
        shown: list[str] = []
        with _interrupts() as interrupted:

            def pause() -> None:
                if interrupted():
                    raise _Interrupted

            texts = self._generator.generate(ids, self._options.parameters, max_tokens=self._options.max_tokens,
                                             stops=self._options.stops, width=self._width, pause=pause,
                                             drafting=self._options.drafting)
            with suppress(_Interrupted), closing(texts):
                for text in texts:
                    shown.append(text)
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    pause()
        print(flush=True)
        return "".join(shown), interrupted()

    def report(self) -> None:
        """Say how the last answer went: figures, and notes and warnings that are new."""
        report = self._generator.report
        if report is None or self._options.quiet:
            return
        print(_statistics(report, self._model.load_seconds), file=sys.stderr)
        for line in (speculation.summary(report.statistics), speculation.time_shares(report.statistics)):
            if line is not None:
                print(f"[{line}]", file=sys.stderr)
        promises, plain_seconds = self._expected()
        notes = list(self._generator.session.notes)
        if self._options.seeded and report.statistics.rule == "reject" and isinstance(self._width, AutoWidth):
            notes.append("the seed may not give this text again: with rejection it depends on the widths of drafts, "
                         "which follow the clock; --accept match or a fixed --width gives it again")
        _say(f"note: {text}" for text in self._said.new(notes))
        _say(f"warning: {text}" for text in
             self._said.new(speculation.warnings(report.statistics, promises, plain_seconds)))

    def _expected(self) -> tuple[list[Promise], float | None]:
        """What the controller promises here, and the seconds of a plain step, where they are known."""
        depth = len(self._generator.session.tokens)
        if isinstance(self._width, AutoWidth):
            promises = self._width.promises(depth)
            return promises, next((p.seconds for p in promises if p.width == 0), None)
        record = None
        if self._width is not None and self._options.parameters.is_plain_argmax:
            record, _ = tuning.find(self._model.artefact, self._model.device)
        return [], None if record is None else CostTable(record.depths, record.rounds).at(depth)[0]


def _say(texts: Iterable[str]) -> None:
    for text in texts:
        print(f"dflashc: {text}", file=sys.stderr)


def _generator(model: Model, options: RunOptions, needed: int) -> Generator:
    """A generator with the context that the user asked for, or one that fits the prompt."""
    context = model.choose_context(options.context, needed)
    if options.context is not None and options.context > context:
        print(f"dflashc: a context of {options.context} tokens was asked for; using {context}, for which the artefact "
              "was built", file=sys.stderr)
    if options.verbose:
        manifest = model.artefact.manifest
        memory = sum(model.artefact.plan.memory(context).values()) + sum(w.bytes for w in manifest.weights)
        print(f"dflashc: {manifest.sources[0].name}, target {manifest.target} ({manifest.requirements.level}), "
              f"{model.device.identity}, context {context}, {memory / 2**20:,.1f} MiB, "
              f"seed {options.parameters.seed}", file=sys.stderr)
    return model.generator(context)


def _lines() -> Iterator[str]:
    """The user's turns; empty lines are none."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing and history for `input`)
    while True:
        try:
            line = input("> " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print()
            return
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8: {error.reason}") from error
        if line.strip():
            yield line


class _Interrupted(Exception):
    """The first Ctrl-C, when it is asked for."""


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C a question that is asked between steps, never in the midst of one; the second ends."""
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)


def _statistics(report: Report, load_seconds: float) -> str:
    counts = report.statistics
    prefill_speed = f", {report.prefill_speed:,.1f} tok/s" if report.prefill_speed else ""
    decode_speed = f", {report.decode_speed:,.1f} tok/s" if report.decoded else ""
    drafted = f", {counts.accepted} of {counts.drafted} drafted accepted" if counts.drafted else ""
    return (f"[prompt {counts.prompt} tokens, {counts.cached} cached{prefill_speed}; "
            f"generated {counts.generated} tokens{decode_speed}{drafted}; "
            f"loaded in {load_seconds:.2f} s; finish: {report.finish}]")
