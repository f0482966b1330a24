"""Tensors to be generated, and GGUF files written from them one tensor at a time.

Knows the block formats and the file format; knows nothing of architectures.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from dflashc.runtime.errors import RequestError

from .quantise import encode, random_rows, row_bytes


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of random numbers around `mean`.

    Attributes
    ----------
    shape
        Row-major: (out, in) for a linear layer.
    deviation
        Standard deviation of the values.
    mean
        For plain tensors only; an array is broadcast to `shape`.
    values
        When given: what to write instead of random numbers, float32 of `shape`, or int64, which is stored as such.
    plain
        Always stored as F32, as norms, biases and other small tensors are.
    """

    name: str
    shape: tuple[int, ...]
    deviation: float = 0.0
    mean: float | np.ndarray = 0.0
    values: np.ndarray | None = None
    plain: bool = False

    @property
    def role(self) -> str:
        """The name without layer and suffix, such as "ffn_down" or "token_embd"."""
        return self.name.removesuffix(".weight").split(".")[-1]


def vector(name: str, size: int, mean: float, deviation: float) -> Tensor:
    """A random vector, always stored as F32."""
    return Tensor(name, (size,), deviation, mean, plain=True)


@dataclass(frozen=True)
class Formats:
    """The block format of each tensor: `default`, unless its role ("ffn_down", "token_embd", ...) is overridden."""

    default: str = "F32"
    overrides: Mapping[str, str] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> str:
        if tensor.values is not None and tensor.values.dtype == np.int64:
            return "I64"
        if tensor.plain:
            return "F32"
        return self.overrides.get(tensor.role, self.default)


def file_type(formats: Formats) -> gguf.LlamaFileType:
    """The nearest `general.file_type`; like everywhere it is a hint, the tensors say what they are."""
    if formats.default == "F32":
        return gguf.LlamaFileType.ALL_F32
    suffix = {"Q3_K": "_M", "Q4_K": "_M", "Q5_K": "_M"}.get(formats.default, "")
    return gguf.LlamaFileType[f"MOSTLY_{formats.default}{suffix}"]


def write_tensors(path: Path, writer: gguf.GGUFWriter, tensors: Iterable[Tensor], formats: Formats, seed: int) -> None:
    """Write the metadata in `writer` and the tensors to `path`; random tensors are made one at a time.

    Every tensor has a random stream of its own, keyed by seed, architecture and name: the same seed gives the same
    bytes, and a tensor does not depend on which others the file has. The file appears when it is complete.

    Raises
    ------
    RequestError
        A row of a tensor is no whole number of blocks of its format, or an override names no tensor.
    """
    tensors = list(tensors)
    unknown = formats.overrides.keys() - {tensor.role for tensor in tensors}
    if unknown:
        raise RequestError(f"the model has no tensor {min(unknown)!r} whose format could be overridden")
    for tensor in tensors:
        block_format = formats.of(tensor)
        try:
            columns = tensor.shape[-1]
            width = columns * np.dtype(np.int64).itemsize if block_format == "I64" else row_bytes(columns, block_format)
            shape = (*tensor.shape[:-1], width)
        except RequestError as error:
            raise RequestError(f"{tensor.name}: {error}; override the format of {tensor.role}") from None
        kind = gguf.GGMLQuantizationType[block_format]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), kind)
    partial = path.with_name(path.name + ".partial")
    try:
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(_data(tensor, formats.of(tensor), [seed, _hash(writer.arch), _hash(tensor.name)]))
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _data(tensor: Tensor, block_format: str, seed: list[int]) -> np.ndarray:
    columns = tensor.shape[-1]
    if block_format == "I64":
        assert tensor.values is not None, "there are no random integers"
        return tensor.values.view(np.uint8)
    if tensor.values is not None:
        return encode(tensor.values.reshape(-1, columns), block_format)
    generator = np.random.default_rng(seed)
    if tensor.plain:
        values = generator.standard_normal(tensor.shape, np.float32) * tensor.deviation + tensor.mean
        return encode(values.reshape(-1, columns), block_format)
    rows = int(np.prod(tensor.shape[:-1]))
    return random_rows(generator, rows, columns, block_format, tensor.deviation)
