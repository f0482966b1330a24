"""Texts that acceptance is measured on: code and prose to continue, questions to answer."""

from __future__ import annotations

import json
from importlib.resources import files

KINDS = ("code", "prose", "chat")


def load_prompts() -> dict[str, list[str]]:
    """Prompts by kind; those of "chat" are messages of a user."""
    return {kind: json.loads(files(__name__).joinpath(f"{kind}.json").read_text(encoding="utf-8")) for kind in KINDS}
