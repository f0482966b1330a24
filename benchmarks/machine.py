"""What the machine can do and how it is: memory bandwidth, processor, load; and other work to disturb it.

Knows nothing of engines.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_BANDWIDTH_BYTES = 512 << 20


def read_bandwidth(threads: int, nbytes: int = _BANDWIDTH_BYTES, repeats: int = 8) -> float:
    """Bytes per second that `threads` threads read from memory, the best of `repeats` passes over `nbytes`.

    The reading loop is NumPy's maximum of uint32, which is vectorised and needs no result stores.
    """
    parts = np.array_split(np.ones(nbytes // 4, np.uint32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, nbytes / (time.perf_counter() - started))
    return best


def describe() -> dict[str, object]:
    """Processor, number of CPUs and load average."""
    return {"processor": _processor(), "cpus": os.cpu_count(), "load": os.getloadavg()[0],
            "kernel": platform.release()}


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` processes that do nothing but use a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
