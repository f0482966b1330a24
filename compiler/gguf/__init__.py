"""Reading GGUF: a bounded reader and the block formats. Knows nothing of models."""

from .blocks import DECODABLE, UNPACKABLE, Unpacked, dequantise, unpack
from .formats import BLOCK_FORMATS, BlockFormat
from .reader import GgufFile, open_gguf
from .tensor import GgufTensor

__all__ = [
    "BLOCK_FORMATS",
    "DECODABLE",
    "UNPACKABLE",
    "BlockFormat",
    "GgufFile",
    "GgufTensor",
    "Unpacked",
    "dequantise",
    "open_gguf",
    "unpack",
]
