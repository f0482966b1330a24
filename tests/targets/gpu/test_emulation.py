"""The emulated GPU sees what a real one would let pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflashc.targets.gpu.traits import Traits
from tests.targets.gpu import small_kernels
from tests.targets.gpu.emulation import run_emulated

TARGETS = [Traits("cuda", "sm_89"), Traits("rocm", "gfx1151")]


@pytest.mark.parametrize("traits", TARGETS, ids=lambda t: t.code)
def test_touching_memory_behind_a_buffer_fails(traits: Traits) -> None:
    """64 floats fill what a buffer begins at a multiple of; the 65th is behind it. What comes after runs as ever."""
    kernel = small_kernels.scale(traits)
    x = np.arange(128, dtype=np.float32)
    with pytest.raises(AssertionError, match="scale touched memory behind a buffer"):
        run_emulated(traits, kernel, [x, 65, np.zeros(64, np.float32), 2.0], 2)
    *_, y = run_emulated(traits, kernel, [x, 64, np.zeros(64, np.float32), 2.0], 1)
    np.testing.assert_array_equal(y, 2 * x[:64])


@pytest.mark.parametrize(("first", "count", "code"), [(0, 128, 0), (0, 129, -11), (-1, 1, 0), (-4096, 1, -11)])
def test_touching_memory_around_a_buffer_of_the_host_ends_the_process(first: int, count: int, code: int) -> None:
    """100 bytes come in two lines of 64 at the end of a page, between two that nobody may touch."""
    program = ("import ctypes; from tests.runtime.device.every_program import allocate_guarded; "
               f"memory = allocate_guarded(100); ctypes.memset(memory.address + {first}, 1, {count})")
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == code
