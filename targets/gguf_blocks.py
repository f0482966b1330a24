"""GGUF blocks taken apart: unsigned codes in the order of K, scales and minima, for the packed formats.

One function per GGUF type, bit for bit, vectorised over rows and blocks. Knows nothing of the packed layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Parts:
    """A piece of a matrix of R rows, taken apart.

    Attributes
    ----------
    codes : array of R * K
        Unsigned codes (the packed format's offset included) in the order of K, uint8; or a float format's bits.
    header : tuple of arrays
        The packed header's fields in their order, each n bytes or floats per row and header group: R * groups * n.
    """

    codes: np.ndarray
    header: tuple[np.ndarray, ...]


def _halves(bytes_: np.ndarray) -> np.ndarray:
    """Little-endian float16 scales out of bytes (…, 2)."""
    return np.ascontiguousarray(bytes_).view("<f2")


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes to (…, 2 n) codes: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bit(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes to (…, 8 n) bits, least significant first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _q8_0(b: np.ndarray) -> Parts:
    return Parts(b[..., 2:] ^ 0x80, (_halves(b[..., :2]),))


def _q4_0(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[..., 2:]), (_halves(b[..., :2]),))


def _q4_1(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[..., 4:]), (_halves(b[..., :2]), _halves(b[..., 2:4])))


def _q5_0(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[..., 6:]) | _bit(b[..., 2:6]) << 4, (_halves(b[..., :2]),))


def _q5_1(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[..., 8:]) | _bit(b[..., 4:8]) << 4, (_halves(b[..., :2]), _halves(b[..., 2:4])))


def _k_scales(packed: np.ndarray) -> np.ndarray:
    """The 6-bit scales and minima of Q4_K and Q5_K: bytes (…, 12) to (…, 16), scale and minimum in turn."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minimum = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return np.stack([scale, minimum], axis=-1).reshape(*packed.shape[:-1], 16)


def _q4_k(b: np.ndarray) -> Parts:
    quants = _nibbles(b[..., 16:].reshape(*b.shape[:-1], 4, 32))
    return Parts(quants, (_k_scales(b[..., 4:16]), _halves(b[..., 0:2]), _halves(b[..., 2:4])))


def _q5_k(b: np.ndarray) -> Parts:
    quants = _nibbles(b[..., 48:].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    high = b[..., 16:48, None].swapaxes(-1, -2) >> np.arange(8, dtype=np.uint8)[:, None]
    return Parts(quants | (high & 1) << 4, (_k_scales(b[..., 4:16]), _halves(b[..., 0:2]), _halves(b[..., 2:4])))


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes to (…, 4, n) codes, least significant first."""
    return packed[..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3


def _q6_k(b: np.ndarray) -> Parts:
    low = _nibbles(b[..., :128].reshape(*b.shape[:-1], 2, 64)).reshape(*b.shape[:-1], 2, 4, 32)
    high = _two_bits(b[..., 128:192].reshape(*b.shape[:-1], 2, 32))
    return Parts(low | high << 4, (b[..., 192:208], _halves(b[..., 208:210])))


def _q3_k(b: np.ndarray) -> Parts:
    low = _two_bits(b[..., 32:96].reshape(*b.shape[:-1], 2, 32))
    high = b[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    packed = b[..., 96:108]
    six = _nibbles(packed[..., :8]) | _two_bits(packed[..., 8:12]).reshape(*b.shape[:-1], 16) << 4
    return Parts(low.reshape(*b.shape[:-1], 8, 32) | high << 2, (six - np.uint8(32), _halves(b[..., 108:110])))


def _q2_k(b: np.ndarray) -> Parts:
    codes = _two_bits(b[..., 16:80].reshape(*b.shape[:-1], 2, 32))
    return Parts(codes, (b[..., :16], _halves(b[..., 80:82]), _halves(b[..., 82:84])))


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # twice the value of E2M1


def _look_up(values: np.ndarray, packed: np.ndarray) -> np.ndarray:
    return (values + 128).astype(np.uint8)[_nibbles(packed)]


def _iq4_nl(b: np.ndarray) -> Parts:
    return Parts(_look_up(_IQ4_VALUES, b[..., 2:]), (_halves(b[..., :2]),))


def _iq4_xs(b: np.ndarray) -> Parts:
    high = np.ascontiguousarray(b[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*b.shape[:-1], 8)
    scale = _halves(b[..., 0:2]).astype(np.float32) * (low + (high << 4).astype(np.float32) - 32)
    codes = _look_up(_IQ4_VALUES, b[..., 8:].reshape(*b.shape[:-1], 8, 16))
    return Parts(codes, (scale.astype(np.float32).reshape(b.shape[0], -1, 1),))


def _mxfp4(b: np.ndarray) -> Parts:
    # the exponent byte means 2**(e - 127); the values are doubled, so 2**(e - 128), exact down to float32's denormals
    scale = np.ldexp(np.float32(1), b[..., :1].astype(np.int32) - 128)
    return Parts(_look_up(_MXFP4_VALUES, b[..., 1:]), (scale.astype(np.float32),))


def _values(dtype: str) -> Callable[[np.ndarray], Parts]:
    return lambda b: Parts(np.ascontiguousarray(b).view(dtype), ())


@dataclass(frozen=True)
class BlockType:
    """A GGUF type: its blocks, the packed format that takes it, how to take blocks apart.

    Attributes
    ----------
    elements, block_bytes : int
        Elements and bytes of a block.
    format : str
        Name of the packed format.
    take_apart : callable
        uint8 (R, blocks, block_bytes) -> Parts.
    substitution : str
        For the user, where the packed format is wider than the file's.
    """

    elements: int
    block_bytes: int
    format: str
    take_apart: Callable[[np.ndarray], Parts]
    substitution: str = ""


BLOCK_TYPES: dict[str, BlockType] = {
    "Q8_0": BlockType(32, 34, "q8_0", _q8_0),
    "Q5_0": BlockType(32, 22, "q5_0", _q5_0),
    "Q5_1": BlockType(32, 24, "q5_1", _q5_1),
    "Q4_0": BlockType(32, 18, "q4_0", _q4_0),
    "Q4_1": BlockType(32, 20, "q4_1", _q4_1),
    "Q6_K": BlockType(256, 210, "q6_k", _q6_k),
    "Q5_K": BlockType(256, 176, "q5_k", _q5_k),
    "Q4_K": BlockType(256, 144, "q4_k", _q4_k),
    "Q3_K": BlockType(256, 110, "q3_k", _q3_k),
    "Q2_K": BlockType(256, 84, "q2_k", _q2_k),
    "IQ4_NL": BlockType(32, 18, "q8_0", _iq4_nl, "IQ4_NL is stored as 8-bit codes: exact, 1.9x the bytes"),
    "IQ4_XS": BlockType(256, 136, "q8_0_f32", _iq4_xs,
                      "IQ4_XS is stored as 8-bit codes with float32 scales: exact, 2.1x the bytes"),
    "MXFP4": BlockType(32, 17, "q8_0_f32", _mxfp4,
                     "MXFP4 is stored as 8-bit codes with float32 scales: exact, 2.1x the bytes"),
    "F32": BlockType(1, 4, "f32", _values("<u4")),
    "F16": BlockType(1, 2, "f16", _values("<u2")),
    "BF16": BlockType(1, 2, "bf16", _values("<u2")),
}
