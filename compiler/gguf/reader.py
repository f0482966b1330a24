"""A GGUF model as the rest of the compiler sees it: metadata and tensors, over one file or a set of shards.

Owns how long files stay open; knows nothing of the byte layout or of models.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from .getters import TypedGetters
from .shard import Shard
from .split import read_set
from .tensor import GgufTensor


class GgufFile(TypedGetters):
    """An opened model. A context manager; once it is closed, tensors cannot be read any more.

    Attributes
    ----------
    paths
        The files, in shard order.
    version
        GGUF version, 2 or 3.
    size
        Bytes of all files.
    metadata
        Keys of the first file (the others only repeat what identifies the set).
    tensors
        By name, in file order over all shards.
    """

    def __init__(self, shards: list[Shard]) -> None:
        self.paths: list[Path] = [shard.path for shard in shards]
        self.version: int = shards[0].version
        self.size: int = sum(shard.file.size for shard in shards)
        self.metadata = shards[0].metadata
        self.tensors: dict[str, GgufTensor] = {
            name: tensor for shard in shards for name, tensor in shard.tensors.items()
        }
        self._files = [shard.file for shard in shards]

    def close(self) -> None:
        for file in self._files:
            file.close()

    def check_unchanged(self) -> None:
        """Raise `GgufError` unless all files are still those that were opened, as they were then."""
        for file in self._files:
            file.check_unchanged()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF model.

    Reads the header alone: neither time nor memory depends on the amount of tensor data.

    Parameters
    ----------
    path
        A file, any shard of a split model, or a folder with one model.

    Raises
    ------
    GgufError
        The file is missing, not GGUF, big-endian, of another version, truncated, or breaks the format or a limit.
    """
    return GgufFile(read_set(Path(path)))
