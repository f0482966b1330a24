"""Runs each program of an artefact alone, on the last tokens that fit: `python -m tests.runtime.device.every_program`.

In a process of its own, since touching memory behind a buffer ends it: on CPUs, buffers end at a page that nobody may
touch; on the emulated GPU its driver sees to that.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.device.cpu import HostMemory
from dflashc.runtime.device.memories import session_memories
from dflashc.runtime.device.opening import open_device

CONTEXT = 512
_ALIGNMENT = 64


def allocate_guarded(nbytes: int) -> HostMemory:
    """`HostMemory.allocate`, between two pages without access."""
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    used = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
    pages = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, pages + 2 * mmap.PAGESIZE), np.uint8)
    for page in (0, mmap.PAGESIZE + pages):
        assert libc.mprotect(memory.ctypes.data + page, mmap.PAGESIZE, 0) == 0
    start = mmap.PAGESIZE + pages - used
    return HostMemory(memory[start : start + nbytes])


def main(path: Path) -> None:
    artefact = load_artefact(path)
    with closing(open_device(artefact)) as device:
        memories = session_memories(artefact, device, CONTEXT)
        memories |= {"hidden": memories["residual"]}
        for program in artefact.plan.programs.values():
            device.upload(memories["state"], np.array([CONTEXT - program.rows, 0], np.int64))
            device.record(program.launches, memories, CONTEXT).run()
        print(len(artefact.plan.programs), "programs ran")


if __name__ == "__main__":
    HostMemory.allocate = staticmethod(allocate_guarded)  # type: ignore[method-assign]
    main(Path(sys.argv[1]))
