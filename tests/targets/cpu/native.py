"""Compiles kernels of a feature level into this process and calls them on NumPy arrays."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dflashc.targets.cpu.compile import compile_objects, link
from dflashc.targets.cpu.traits import LEVELS, host_features
from dflashc.targets.requests import KernelRequest

LEVEL_NAMES = list(LEVELS)


def require_level(level: str) -> None:
    """Skip the test where this machine lacks what `level` needs."""
    missing = set(LEVELS[level].features) - host_features()
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")


class Library:
    """Kernels of one level, compiled to a shared library in `folder`."""

    def __init__(self, level: str, requests: Sequence[KernelRequest], folder: Path) -> None:
        self.traits = LEVELS[level]
        path = folder / f"{level}.so"
        link(compile_objects(level, requests, folder, with_executor=False), path)
        self._library = ctypes.CDLL(str(path))

    def run(self, kernel: str, operands: Sequence[np.ndarray | int | float], units: int) -> None:
        """Run units 0 to `units` - 1, in two calls, the later half first: units do not depend on each other."""
        function = getattr(self._library, kernel)
        function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        table = np.array([_word(operand) for operand in operands], np.int64)
        for begin, end in ((units // 2, units), (0, units // 2)):
            function(table.ctypes.data, begin, end)


def _word(operand: np.ndarray | int | float) -> int:
    if isinstance(operand, np.ndarray):
        assert operand.flags.c_contiguous
        return operand.ctypes.data
    return int(np.float32(operand).view(np.int32)) if isinstance(operand, float) else operand
