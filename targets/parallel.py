"""Runs a function in worker processes over many jobs. Knows nothing of kernels."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


def processors() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def run_parallel(function: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], workers: int,
                 finished: Callable[[Result], None]) -> list[Result]:
    """`function(*job)` of every job, in order; `finished` hears each result in that order.

    `function` is module-level, since processes import it; the first failure cancels what has not started and is raised.
    """
    # spawn, not fork: LLVM and TVM hold threads and locks that do not survive a fork
    context = multiprocessing.get_context("spawn")
    results = []
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        with _interrupts_blocked():  # the first job starts the processes
            futures = [pool.submit(function, *job) for job in jobs]
        try:
            for future in futures:
                results.append(future.result())
                finished(results[-1])
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return results


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started within never get the SIGINT that a terminal sends to all of them: this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
