"""A device whose model is a Python function: sessions with countable tokens, without weights or kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.manifest import Manifest, Requirements
from dflashc.runtime.plan import Buffer, Launch, Plan, Program, Units
from dflashc.runtime.session import Session

ROWS = (1, 2, 4)


class ScriptedMemory:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.nbytes = array.nbytes

    def view(self, offset: int, nbytes: int | None = None) -> ScriptedMemory:
        return ScriptedMemory(self.array[offset : None if nbytes is None else offset + nbytes])


class ScriptedDevice:
    """After tokens t, the next one is `model(t)`; `runs` are the rows of every run of the decoder so far.

    The cache holds tokens in place of keys and values, so that a session that rewinds wrongly is found out.
    """

    name = "scripted"

    def __init__(self, model: Callable[[list[int]], int], vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.uploaded = self.downloaded = self.synchronisations = 0
        self.runs: list[int] = []
        self._cache: dict[int, int] = {}

    def check_memory(self, artefact: Artefact, context: int) -> None: ...

    def alloc(self, nbytes: int, shared: bool = False) -> ScriptedMemory:
        return ScriptedMemory(np.zeros(nbytes, np.uint8))

    def weights(self, artefact: Artefact) -> dict[str, ScriptedMemory]:
        return {}

    def upload(self, memory: ScriptedMemory, data: np.ndarray, offset: int = 0) -> None:
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        memory.array[offset : offset + flat.size] = flat

    def download(self, memory: ScriptedMemory, dtype: str, count: int, offset: int = 0) -> np.ndarray:
        return memory.array[offset : offset + np.dtype(dtype).itemsize * count].view(dtype).copy()

    def record(self, launches: Sequence[Launch], memories: Mapping[str, Any], context: int) -> ScriptedReplay:
        return ScriptedReplay(self, [x.kernel for x in launches], memories)

    def close(self) -> None: ...

    def run(self, kernels: list[str], memories: Mapping[str, Any]) -> None:
        n = int(memories["state"].array[:8].view(np.int64)[0])
        _, decoder, *others = kernels  # after the rope tables
        rows = int(decoder.partition(".")[2])
        self.runs.append(rows)
        self._cache |= dict(enumerate(memories["tokens"].array.view(np.int32)[:rows].tolist(), n))
        following = self.model([self._cache[i] for i in range(n + rows)])
        for role in (kernel.partition(".")[0] for kernel in others):
            if role in ("ids", "draw"):  # what is drawn is what the model says
                self.upload(memories["ids"], np.array([following], np.int32))
            elif role == "logits":
                logits = np.full(self.vocabulary, -100, np.float32)
                logits[following] = 0
                self.upload(memories["logits"], logits)
            else:
                self.upload(memories["emitted"], np.array([0, following], np.int32))
                self.upload(memories["state"], np.array([n + 1], np.int64))
                self.upload(memories["tokens"], np.array([following], np.int32))


class ScriptedReplay:
    def __init__(self, device: ScriptedDevice, kernels: list[str], memories: Mapping[str, Any]) -> None:
        self._device, self._kernels, self._memories = device, kernels, memories
        self._runs = 0

    def run(self) -> None:
        self._device.run(self._kernels, self._memories)
        self._runs += 1

    def ticks(self) -> np.ndarray:
        """Every launch takes one tick a run."""
        return np.full(len(self._kernels), self._runs)


def scripted_artefact(vocabulary: int, context: int) -> Artefact:
    """An artefact without files, for a `ScriptedDevice`."""
    buffers = {b.name: b for b in (
        Buffer("state", "state", 64), Buffer("tokens", "state", 16), Buffer("residual", "scratch", 64),
        Buffer("hidden", "view", 64), Buffer("ids", "output", 4), Buffer("logits", "output", 4 * vocabulary),
        Buffer("block", "state", 4), Buffer("history", "state", 0, 4), Buffer("sampling", "state", 128),
        Buffer("emitted", "output", 8))}
    roles = [*((role, rows) for role in ("positions", "decode") for rows in ROWS),
             *((role, 1) for role in ("ids", "logits", "draw", "accept"))]
    programs = {f"{role}.{rows}": Program(role, rows, (Launch(f"{role}.{rows}", role, Units(1), 1, ()),))
                for role, rows in roles}
    manifest = Manifest(
        dflashc="", target="scripted", requirements=Requirements("", "", (), 0), sources=(),
        config={"vocabulary": vocabulary, "hidden": 1}, drafter={}, kv_types={}, context=context,
        weights=(), self_test=(), notes=())
    return Artefact(Path(), manifest, Plan(buffers, programs, context))


def scripted_session(model: Callable[[list[int]], int], vocabulary: int, context: int = 256) -> Session:
    """A session whose model is `model`; its device is `session._device`."""
    return Session(scripted_artefact(vocabulary, context), ScriptedDevice(model, vocabulary), context)
