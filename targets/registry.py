"""Targets by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dflashc.runtime.errors import TargetError

if TYPE_CHECKING:
    from dflashc.targets.base import Target

FAMILIES = ("cpu", "cuda", "vulkan", "rocm")
"""Folders of `targets`; each has a module `target` with `names` and `make_target`."""


def find_target(name: str) -> Target:
    """The target that the user named; raises `TargetError` listing the known ones."""
    family = name.partition("-")[0]
    if family in FAMILIES:
        target: Target = import_module(f"dflashc.targets.{family}.target").make_target(name)
        return target
    raise TargetError(f"unknown target {name!r}; known: {', '.join(target_names())}")


def target_names() -> list[str]:
    """The names of all targets."""
    return [n for family in FAMILIES for n in import_module(f"dflashc.targets.{family}.target").names()]
