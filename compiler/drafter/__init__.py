"""Drafter files: every dialect in, one configuration and one set of tensor names out. Knows nothing of targets."""

from dflashc.compiler.drafter.config import Drafter, DrafterConfig, Provenance, describe
from dflashc.compiler.drafter.dialects import alias_table, dialect_table, is_drafter, markdown
from dflashc.compiler.drafter.normalise import normalise

__all__ = [
    "Drafter",
    "DrafterConfig",
    "Provenance",
    "alias_table",
    "describe",
    "dialect_table",
    "is_drafter",
    "markdown",
    "normalise",
]
