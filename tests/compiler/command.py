"""Runs the command line inside the test process or beside it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from dflashc.compiler.cli import main

COMMAND = [sys.executable, "-c", "from dflashc.compiler.cli import main; main()"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Here:
    """Calls `main` and captures what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Result:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        captured = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, captured.out, captured.err)

    def error(self, code: int, *arguments: object) -> str:
        """Expect exit code `code`, nothing on standard output and one line on standard error, which is returned."""
        result = self(*arguments)
        assert result.code == code, result
        (line,) = result.err.splitlines()
        assert line.startswith("dflashc: error: ")
        return line.removeprefix("dflashc: error: ")


def beside(*arguments: object, stdin: str = "", timeout: float = 120) -> Result:
    """Run a process of its own."""
    done = subprocess.run([*COMMAND, *map(str, arguments)], input=stdin.encode(), capture_output=True, timeout=timeout,
                          check=False)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())
