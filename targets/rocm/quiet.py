"""Drops what libraries write to standard error for a moment. Knows nothing of why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def standard_error_dropped() -> Iterator[None]:
    """For worker processes: it holds for all threads of a process, and for C++ that writes to file descriptor 2."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
