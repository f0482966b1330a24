"""The engines under measurement, each in a process of its own that takes requests line by line.

Owns how they are started and what the kernel says of their memory. Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import click

_ROOT = Path(__file__).parents[1]
_HELPER = Path(__file__).parent / "llama_decode.cpp"


class PeerMissing(Exception):
    """llama.cpp cannot be measured; says why."""


class Engine:
    """A running engine.

    Parameters
    ----------
    command : list of str
        Program and arguments; answers every line on its standard input with a JSON value.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)

    def ask(self, request: str) -> float:
        """The answer to a request; raises `click.ClickException` when the process has ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise click.ClickException(f"{' '.join(self._command)} ended with {self._process.wait()} at '{request}'")
        return float(json.loads(line))

    def waited(self) -> float:
        """Seconds that its threads were ready and had no core, since the start; other work took it."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[1]) for task in tasks) / 1e9

    def memory(self) -> dict[str, int]:
        """Bytes resident at the peak, and anonymous and mapped ones now."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        fields = {"peak": "VmHWM", "anonymous": "RssAnon", "mapped": "RssFile"}
        return {name: 1024 * int(status.split(f"{field}:")[1].split()[0]) for name, field in fields.items()}

    def close(self) -> None:
        """End the process."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def dflashc_command(artefact: Path, threads: int) -> list[str]:
    """How to start an artefact's engine."""
    return [sys.executable, "-m", "benchmarks.worker", str(artefact.resolve()), str(threads)]


def llama_cpp_command(helper: Path, model: Path, threads: int) -> list[str]:
    """How to start llama.cpp's engine."""
    return [str(helper.resolve()), str(model.resolve()), str(threads)]


def compile_llama_cpp(build: Path | None, folder: Path) -> Path:
    """Compile the helper against a build of llama.cpp.

    Parameters
    ----------
    build : Path or None
        Build folder that CMake configured, with the shared libraries in `bin`.
    folder : Path
        Receives the program.

    Raises
    ------
    PeerMissing
        Not given, not a build, or the compiler refuses.
    """
    if build is None:
        raise PeerMissing("--llama-cpp was not given")
    libraries, cache = (build / "bin").resolve(), build / "CMakeCache.txt"
    if not cache.is_file() or not (libraries / "libllama.so").exists():
        raise PeerMissing(f"{build} is no build folder of llama.cpp: CMakeCache.txt or bin/libllama.so is missing")
    found = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", cache.read_text(), re.MULTILINE)
    if not found:
        raise PeerMissing(f"{cache} does not name the source folder")
    source, program = Path(found[1]), folder / "llama_decode"
    command = [os.environ.get("CXX", "g++"), "-O2", "-std=c++17", str(_HELPER), "-o", str(program),
               f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}",
               f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerMissing(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        raise PeerMissing(f"{_HELPER.name} does not compile against {source}: {done.stderr.strip().splitlines()[0]}")
    return program
