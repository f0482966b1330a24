"""PackWeights: from GGUF tensors to the target's layout, in one file, piece by piece.

Decides where each weight lies; the target supplies the layout. A build holds one piece at a time, never a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflashc.compiler.gguf import GgufTensor
from dflashc.runtime.artefact import WEIGHT_ALIGNMENT
from dflashc.runtime.manifest import Weight
from dflashc.targets.context import PackedWeight

PIECE_BYTES = 16 << 20

RAW = "raw"
"""Format of what is stored as a plain array: norms, biases, frequency tables."""


@dataclass(frozen=True)
class WeightSource:
    """Where a weight's data comes from: a GGUF tensor to pack, or an array to store as it is."""

    packed: PackedWeight
    tensor: GgufTensor | None = None
    array: np.ndarray | None = None


PackRows = Callable[[str, np.ndarray, int], np.ndarray]
"""pack_rows(GGUF type, uint8 (rows, row_bytes), columns) -> uint8: the target's layout of consecutive rows."""


def place_weights(sources: Iterable[WeightSource]) -> list[Weight]:
    """Offsets of all weights in `weights.bin`, in order."""
    placed, offset = [], 0
    for source in sources:
        w = source.packed
        placed.append(Weight(w.name, w.format, w.rows, w.columns, offset, w.bytes))
        offset += -(-w.bytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
    return placed


def write_weights(path: Path, sources: Mapping[str, WeightSource], placed: Iterable[Weight],
                  pack_rows: PackRows, group: int, progress: Callable[[int], None]) -> None:
    """Write `weights.bin`.

    Parameters
    ----------
    group : int
        Rows that the layout keeps together; pieces are multiples of it.
    progress : callable
        Called with the bytes just written.
    """
    with path.open("wb") as file:
        for weight in placed:
            file.seek(weight.offset)
            written = 0
            for piece in _pieces(sources[weight.name], pack_rows, group):
                file.write(piece.data)
                written += piece.nbytes
                progress(piece.nbytes)
            assert written == weight.bytes, f"{weight.name}: {written} bytes packed, {weight.bytes} planned"
        file.truncate(-(-file.tell() // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT)


def _pieces(source: WeightSource, pack_rows: PackRows, group: int) -> Iterable[np.ndarray]:
    if source.array is not None:
        yield np.ascontiguousarray(source.array).view(np.uint8).reshape(-1)
        return
    tensor = source.tensor
    assert tensor is not None, f"{source.packed.name} has no source"
    step = max(group, PIECE_BYTES // max(1, tensor.nbytes // tensor.rows) // group * group)
    for first in range(0, tensor.rows, step):
        data = tensor.read_rows(first, min(step, tensor.rows - first))
        yield pack_rows(tensor.type_name, data, source.packed.columns)
