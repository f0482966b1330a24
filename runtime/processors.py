"""The processor, and how many threads may usefully compute on it. Knows nothing of what they compute."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

from dflashc.runtime.errors import RequestError

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPUS = Path("/sys/devices/system/cpu")
_CPUINFO = Path("/proc/cpuinfo")


def available_processors(quota: Path = _QUOTA, cpus: Path = _CPUS) -> int:
    """Cores that this process may use: its affinity, the hardware threads of a core counted once, within its quota.

    Threads wait for each other by spinning, so one too many costs more than one too few.

    Parameters
    ----------
    quota : Path
        `cpu.max` of the control group: "<microseconds | max> <period>".
    cpus : Path
        Where the kernel tells the topology.
    """
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list", str(cpu)) for cpu in allowed}
    try:
        limit, period = quota.read_text().split()
        return max(1, min(len(cores), math.ceil(int(limit) / int(period))))
    except (OSError, ValueError):  # no control group, or "max"
        return len(cores)


def choose_threads(asked: int | None) -> int:
    """`asked`, or the number of available cores; raises `RequestError` for more than the CPUs of this process."""
    if asked is None:
        return available_processors()
    most = len(os.sched_getaffinity(0))
    if not 1 <= asked <= most:
        raise RequestError(f"{asked} threads asked for; this process may use 1 to {most}")
    return asked


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's model as the kernel tells it, with family, model and stepping: clouds give several one name."""
    try:
        lines = cpuinfo.read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.machine()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    numbers = "/".join(values.get(key, "?") for key in ("cpu family", "model", "stepping"))
    return f"{values.get('model name', platform.machine())} ({numbers})"


def _siblings(path: Path, alone: str) -> str:
    """The hardware threads that share a core, as the kernel lists them."""
    try:
        return path.read_text().strip()
    except OSError:
        return alone
