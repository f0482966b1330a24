"""The errors a user can meet, each with its exit code.

Lives in `runtime`, the bottom layer, so that both the compiler and a machine that only runs artefacts share it.
"""

from __future__ import annotations


class DflashError(Exception):
    """One line for the user: what was found, what was expected, what to do."""

    exit_code = 1


class RequestError(DflashError):
    """A request that cannot be served as asked: a bad option, prompt, template or sampling parameter."""

    exit_code = 2


class GgufError(DflashError):
    """A GGUF file that is damaged, hostile, or holds something not supported."""

    exit_code = 3


class PairError(DflashError):
    """A target and a drafter that do not belong together."""

    exit_code = 3


class BuildError(DflashError):
    """A model that cannot be compiled as asked."""

    exit_code = 3


class TargetError(DflashError):
    """A toolchain or device that is missing or unfit."""

    exit_code = 4


class ArtefactError(DflashError):
    """An artefact that is damaged, incomplete, of another version, or made for another device."""

    exit_code = 5
