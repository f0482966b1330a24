"""Shows how far a build is, and turns Ctrl-C into an orderly end of it.

Implements `build.Progress` for a terminal; knows nothing of what the stages do.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

_CONCURRENT = ("kernels", "weights")
"""Stages that run at the same time, in two threads."""


class BuildProgress:
    """Bars on a terminal, nothing elsewhere.

    A context manager. An interrupt raises `KeyboardInterrupt` at once where one thread works; where two do, each of
    them meets it at its next step, so that both have ended when the build removes what it wrote.
    """

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<9}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
            console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._concurrent = False
        self._interrupted = False

    def start(self, stage: str, total: int) -> None:
        self._check()
        self._concurrent = stage in _CONCURRENT
        self._tasks[stage] = self._bars.add_task(stage, total=total)

    def advance(self, stage: str, amount: int) -> None:
        self._check()
        self._bars.advance(self._tasks[stage], amount)

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()
        signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        if not self._concurrent:
            raise KeyboardInterrupt

    def _check(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
