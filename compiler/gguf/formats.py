"""The tensor data types of GGUF: name, id, elements and bytes per block.

Owns the table and the description of ids that are not in it; knows nothing of files or of how a block is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one data type is stored: rows are cut into blocks of `block_size` elements, `block_bytes` bytes each."""

    name: str
    type_id: int
    block_size: int
    block_bytes: int


BLOCK_FORMATS: dict[str, BlockFormat] = {
    kind.name: BlockFormat(kind.name, int(kind), size, nbytes) for kind, (size, nbytes) in GGML_QUANT_SIZES.items()
}
"""Every type of the format by name, also those that only `GgufTensor.data` can read."""

FORMATS_BY_ID: dict[int, BlockFormat] = {block_format.type_id: block_format for block_format in BLOCK_FORMATS.values()}

# Ids that files in circulation carry without being in the table. Forks number their types independently.
_FOREIGN_IDS: tuple[tuple[range, str], ...] = (
    (range(4, 6), "Q4_2 and Q4_3, removed from llama.cpp in 2023"),
    (range(31, 34), "Q4_0_4_4 to Q4_0_8_8, repacked layouts removed from llama.cpp"),
    (range(36, 39), "IQ4_NL_4_4 to IQ4_NL_8_8, removed from llama.cpp, or I2_S of BitNet forks"),
    (range(39, 97), "types of a newer llama.cpp or of a TurboQuant fork"),
    (range(97, 400), "types of ik_llama.cpp, such as Q6_0, IQ2_K to IQ6_K, IQ4_KS, IQ2_KT and their _R4 layouts"),
)


def describe_unknown(type_id: int) -> str:
    """The families known to use an id that is not in `FORMATS_BY_ID`, for an error message."""
    for ids, family in _FOREIGN_IDS:
        if type_id in ids:
            return family
    return f"no known family; the format's own ids go from 0 to {max(FORMATS_BY_ID)}"
