"""Artefacts of many pairs from kernels that are compiled once: the pairs differ in weights and plans alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from dflashc.compiler.build import BuildOptions, build, lower
from dflashc.runtime.artefact import KERNELS, load_artefact
from dflashc.runtime.device.cpu import CpuDevice
from dflashc.runtime.manifest import Requirements
from dflashc.runtime.session import Session
from dflashc.targets.cpu.compile import compile_library
from dflashc.targets.cpu.target import CpuTarget, make_target
from dflashc.targets.cpu.traits import best_level, host_features
from tests.proof.running import device_of
from tests.rounds.files import Files

CONTEXT = 1024


class Workshop:
    """Builds on demand, with one library of the kernels of all that could be asked for, and opens sessions.

    Parameters
    ----------
    files : mapping
        What to build, by name.
    """

    def __init__(self, files: Mapping[str, Files], folder: Path) -> None:
        self._options = {
            name: BuildOptions(f.model, "cpu", folder / f"{name}.dflash", f.drafter, f.overrides, CONTEXT, *f.kv_types)
            for name, f in files.items()}
        self._library = folder / "kernels.so"
        self._requests: dict[str, Any] = {}
        self._devices: dict[str, CpuDevice] = {}
        self._opened = ExitStack()
        for options in self._options.values():
            with closing(lower(options)) as lowered:
                self._requests |= lowered.requests
        compile_library(best_level(host_features()), list(self._requests.values()), self._library)

    def artefact(self, name: str) -> Path:
        """Built at the first call; not to be changed."""
        options = self._options[name]
        if not options.output.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CpuTarget, "compile", self._take)
                build(options)
        return options.output

    def session(self, name: str, context: int = CONTEXT) -> Session:
        """A fresh session, its caches zero; those of one name share a device."""
        if name not in self._devices:
            self._devices[name] = self._opened.enter_context(device_of(self.artefact(name)))
        return Session(load_artefact(self.artefact(name)), self._devices[name], context)

    def options(self, name: str) -> BuildOptions:
        """What is built under a name."""
        return self._options[name]

    def close(self) -> None:
        self._opened.close()

    def _take(self, requests: Sequence[Any], folder: Path, progress: Callable[[int], None]) -> Requirements:
        assert all(self._requests[request.name] == request for request in requests)
        shutil.copy(self._library, folder / KERNELS)
        return make_target("cpu").requirements()
