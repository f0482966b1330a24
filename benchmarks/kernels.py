"""Where the time of one run or round goes, kernel by kernel, and the bytes that it must read.

Runs programs of an artefact's plan straight on the device, with random caches of any depth, so a depth costs no
prefill. Knows nothing of sessions or of other engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflashc.compiler.inspect_plan import cache_bytes
from dflashc.runtime.artefact import Artefact, load_artefact
from dflashc.runtime.device.base import Device
from dflashc.runtime.device.memories import session_memories
from dflashc.runtime.device.opening import open_device
from dflashc.runtime.plan import CONTEXT_STEP, Launch
from dflashc.runtime.rounds import round_programs


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel in a run; `part` is the role of their program, such as "decode" or the head's name."""

    part: str
    kernel: str
    launches: int
    seconds: float
    bytes_read: int
    flops: int


def launches(artefact: Artefact, rows: int, head: str, head_rows: int) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """Launches of the decode program for `rows` tokens, and of the head over `head_rows` of them."""
    programs = artefact.plan.programs
    return programs[f"decode.{rows}"].launches, programs[f"{head}.{head_rows}"].launches


def bytes_of_run(artefact: Artefact, depth: int, rows: int, head: str) -> int:
    """Bytes of weights and caches that a run of `rows` tokens at `depth` has to read at least once."""
    decode, output = launches(artefact, rows, head, rows)
    return sum(x.bytes_read for x in decode + output) + cache_bytes(artefact.manifest, "target", depth)


def bytes_of_round(artefact: Artefact, depth: int, width: int) -> int:
    """Bytes of weights and caches that a round of `width` proposals at `depth` has to read at least once."""
    placed = {w.name: w.offset for w in artefact.manifest.weights}
    spans = set()
    for _, launch in round_launches(artefact, width):
        first = next((o for o in launch.operands if o.kind == "weight"), None)
        if first and launch.bytes_read:
            start = placed[first.name] + int(first.value)
            spans.add((start, start + launch.bytes_read))
    manifest = artefact.manifest
    return _covered(spans) + sum(cache_bytes(manifest, model, depth) for model in manifest.kv_types)


def profile(directory: Path, threads: int, depth: int, rows: int, head: str, runs: int = 8) -> list[KernelTime]:
    """Mean time of each kernel in the faster half of `runs` runs, the costliest first.

    Parameters
    ----------
    rows : int
        Tokens; above 16 the head is run for the last one only, as a prefill does.
    """
    artefact = load_artefact(directory)
    return _profile(artefact, threads, depth, rows, run_launches(artefact, rows, head), runs)


def profile_round(directory: Path, threads: int, depth: int, width: int, runs: int = 8) -> list[KernelTime]:
    """The same of a round that drafts `width` proposals."""
    artefact = load_artefact(directory)
    return _profile(artefact, threads, depth, width + 1, round_launches(artefact, width), runs)


def run_launches(artefact: Artefact, rows: int, head: str) -> list[tuple[str, Launch]]:
    """Launches of a run of `rows` tokens with the roles of their programs; of the head as in `profile`."""
    head_rows = rows if f"{head}.{rows}" in artefact.plan.programs else 1
    decode, output = launches(artefact, rows, head, head_rows)
    return [(part, x) for part, xs in (("decode", decode), (head, output)) for x in xs]


def round_launches(artefact: Artefact, width: int) -> list[tuple[str, Launch]]:
    """Launches of a greedy round with the roles of their programs; of plain decoding where there is no drafter."""
    drafter, programs = artefact.manifest.drafter, artefact.plan.programs
    roles = ("ids", "inject", "accept") if drafter else ("ids", "accept")
    names = round_programs(width, drafter.get("block_rows", 0), *roles)
    return [(programs[name].role, launch) for name in names for launch in programs[name].launches]


def _covered(spans: set[tuple[int, int]]) -> int:
    """Bytes that lie in at least one of the spans."""
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _profile(artefact: Artefact, threads: int, depth: int, rows: int, parts: Sequence[tuple[str, Launch]],
             runs: int) -> list[KernelTime]:
    with closing(open_device(artefact, threads=threads)) as device:
        return profile_on(device, artefact, depth, rows, parts, runs)


def profile_on(device: Device[Any], artefact: Artefact, depth: int, rows: int, parts: Sequence[tuple[str, Launch]],
               runs: int) -> list[KernelTime]:
    """The same on an open device, of launches with the roles of their programs."""
    context = -(-(depth + rows) // CONTEXT_STEP) * CONTEXT_STEP
    memories = _memories(artefact, device, context)
    replay = device.record([launch for _, launch in parts], memories, context)
    times = []
    for _ in range(runs + 1):
        device.upload(memories["state"], np.array([depth, 0], np.int64))  # a round moves on
        times.append(replay.seconds())
    # Where the clock's thread lost its core, others did its work, and the time is noted at the wrong kernel.
    seconds = np.array(times[1:])
    fast = np.argsort(seconds.sum(axis=1))[: -(-runs // 2)]
    return _by_kernel(parts, seconds[fast].mean(axis=0))


def _memories(artefact: Artefact, device: Device[Any], context: int) -> Mapping[str, Any]:
    random = np.random.default_rng(0)
    memories = session_memories(artefact, device, context)
    for name, buffer in artefact.plan.buffers.items():
        if buffer.role == "cache":
            values = random.standard_normal(memories[name].nbytes // 2, np.float32)
            device.upload(memories[name], values.astype(np.float16))
    return memories | {"hidden": memories["residual"]}


def _by_kernel(parts: Sequence[tuple[str, Launch]], seconds: np.ndarray) -> list[KernelTime]:
    groups: dict[tuple[str, str], list[int]] = {}
    for index, (part, launch) in enumerate(parts):
        groups.setdefault((part, launch.kernel), []).append(index)
    times = [KernelTime(part, kernel, len(members), float(seconds[members].sum()),
                        sum(parts[i][1].bytes_read for i in members), sum(parts[i][1].flops for i in members))
             for (part, kernel), members in groups.items()]
    return sorted(times, key=lambda t: -t.seconds)
