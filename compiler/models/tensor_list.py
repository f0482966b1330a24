"""Which tensors a model's graph reads, and what every target asks of them; from headers alone, without TVM.

The graph's code is walked and nothing is written, so a file that a build would refuse for its tensors is refused here,
in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflashc.compiler.gguf import DECODABLE, GgufFile, GgufTensor
from dflashc.compiler.gguf.cursor import shown
from dflashc.compiler.models.config import ModelConfig
from dflashc.compiler.models.graph import Graph, Layer, decode, head
from dflashc.runtime.errors import BuildError

HEAD_UNIT = 8
"""Elements that the size of an attention head must be a multiple of, on every target."""

COLUMN_UNIT = 32
"""Columns that those of a matrix must be a multiple of, on every target."""

_WITH_THE_CONFIGURATION = ("rope_freqs.weight",)
_SHOWN = 3


@dataclass
class TensorList(Graph):
    """A graph that is only walked; `read` are the names of the tensors it reads, in order."""

    read: dict[str, None] = field(default_factory=dict)

    def input(self, name: str, shape: tuple[object, ...], dtype: str) -> Any:
        return None

    def call(self, operator: str, *arguments: Any, name: str = "") -> Any:
        return None

    def weight(self, name: str, *shape: int) -> Any:
        self.read[name] = None
        return super().weight(name, *shape)


def check_model(gguf: GgufFile, config: ModelConfig, layer: Layer) -> list[str]:
    """Check that the graph finds its tensors, and that targets can take them; returns notes for the user.

    Raises
    ------
    BuildError, GgufError
        A tensor is missing, of another shape, or of a format that no target has kernels for.
    """
    if config.head_size % HEAD_UNIT:
        raise BuildError(f"{gguf.paths[0]}: attention heads of {config.head_size} elements found; every target needs a "
                         f"multiple of {HEAD_UNIT}")
    walk = TensorList(gguf.tensors, config)
    decode(walk, layer, ())
    head(walk)
    used = [*walk.read, *_WITH_THE_CONFIGURATION]
    check_formats(gguf.tensors[name] for name in used if name in gguf.tensors)
    return unused_note("model", [name for name in gguf.tensors if name not in used])


def check_formats(tensors: Iterable[GgufTensor]) -> None:
    """Raise `BuildError` or `GgufError` for a weight of a format, or with columns, that no target has kernels for."""
    for tensor in tensors:
        tensor.known_format()
        what = f"{tensor.path}: tensor {shown(tensor.name)}"
        if tensor.type_name not in DECODABLE:
            raise BuildError(f"{what} is {tensor.type_name}, which no target has kernels for; convert the model to one "
                             f"of {', '.join(sorted(DECODABLE))}")
        if not stays_plain(tensor) and tensor.shape[-1] % COLUMN_UNIT:
            raise BuildError(f"{what} has {tensor.shape[-1]} columns; every target needs a multiple of {COLUMN_UNIT}")


def stays_plain(tensor: GgufTensor) -> bool:
    """Whether a weight is used as a float32 array: norms, biases, convolution kernels. Matrices are packed."""
    return len(tensor.shape) != 2


def unused_note(whose: str, names: Sequence[str]) -> list[str]:
    """A note that says which tensors of a file nothing reads; none where there are none."""
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
    verb = "is" if len(names) == 1 else "are"
    return [f"{count} of the {whose} {verb} not used: {', '.join(map(shown, names[:_SHOWN]))}{more}"]
