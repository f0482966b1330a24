"""Looks for GPUs of every kind without trusting drivers: each is asked in a process of its own, with a time limit.

A driver that crashes or hangs there costs its answer and nothing else. Run as a program, it answers for one kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from dflashc.runtime.device.driver import GpuInfo, Limits
from dflashc.runtime.device.opening import GPU_MODULES, gpu_module
from dflashc.runtime.errors import DflashError

SECONDS = 30.0
"""Time that a driver has to answer; a GPU that sleeps may take some of it to wake up."""


@dataclass(frozen=True)
class Survey:
    """What there is of one kind.

    Attributes
    ----------
    machine : str
        As artefacts name it: a key of `GPU_MODULES`.
    missing : str
        Why there are no GPUs, in one line; "" where there are some.
    """

    machine: str
    gpus: tuple[GpuInfo, ...]
    missing: str


def survey(seconds: float = SECONDS) -> list[Survey]:
    """All kinds, asked at the same time."""
    asked: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for machine in GPU_MODULES:
            asked[machine] = subprocess.Popen([sys.executable, "-m", __name__, machine], stdin=subprocess.DEVNULL,
                                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return [_answer(machine, process, seconds) for machine, process in asked.items()]
    finally:
        for process in asked.values():
            process.kill()
            process.wait()


def _answer(machine: str, process: subprocess.Popen[bytes], seconds: float) -> Survey:
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Survey(machine, (), f"the driver did not answer within {seconds:.0f} s")
    try:
        document = json.loads(said.splitlines()[-1])  # drivers may print what they like before
        return Survey(machine, tuple(_info(**gpu) for gpu in document["gpus"]), document["missing"])
    except (ValueError, IndexError, KeyError, TypeError):
        return Survey(machine, (), f"the driver crashed (exit code {process.returncode})")


def _info(limits: dict[str, Any], features: list[str], **members: Any) -> GpuInfo:
    x, y, z = limits.pop("threads")
    return GpuInfo(limits=Limits(threads=(x, y, z), **limits), features=frozenset(features), **members)


def describe(machine: str) -> dict[str, Any]:
    """The GPUs of one kind as JSON has them, asked in this process."""
    try:
        gpus = gpu_module(machine).find_gpus()
    except DflashError as error:
        return {"gpus": [], "missing": str(error)}
    return {"gpus": [asdict(gpu) | {"features": sorted(gpu.features)} for gpu in gpus],
            "missing": "" if gpus else "the driver shows no GPU"}


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
