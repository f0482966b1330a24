"""Where the larger test material lies: models and what other programs said about them."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("DFLASHC_SHARED", Path(__file__).parents[3] / "shared"))


def shared(name: str) -> Path:
    """Path of a file in the shared folder; the calling test is skipped when it is absent."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{path} is not there; point DFLASHC_SHARED to the folder that has {name}")
    return path


@cache
def golden(name: str) -> Any:
    """What llama.cpp said about a model: the parsed file golden/`name`.json."""
    return json.loads(shared(f"golden/{name}.json").read_text())
