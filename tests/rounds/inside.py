"""Looks inside a session: caches by position, the result of a block, what a run costs the host.

Knows how the CPU lays out its caches (`targets.cpu.kernels.attention_head`); every model here has heads of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dflashc.runtime.rounds import round_programs
from dflashc.runtime.session import Session
from dflashc.targets.cpu.traits import best_level, host_features

HEAD_SIZE = 64


def read(session: Session, buffer: str, dtype: str) -> np.ndarray:
    """A whole buffer."""
    memory = session._memories[buffer]
    return session._device.download(memory, dtype, memory.nbytes // np.dtype(dtype).itemsize)


def write(session: Session, buffer: str, values: np.ndarray) -> None:
    session._device.upload(session._memories[buffer], values)


def run(session: Session, *programs: str) -> None:
    """Run programs at the session's length."""
    session._set_length()
    session._replay(0, *programs).run()


def by_position(session: Session, buffer: str) -> np.ndarray:
    """Bits of a cache, uint16 (layers * KV heads, context, head size)."""
    bits = read(session, buffer, "uint16")
    if not buffer.endswith("k"):
        return bits.reshape(-1, session.context, HEAD_SIZE)
    lanes = best_level(host_features()).lanes
    tiles = bits.reshape(-1, session.context // lanes, HEAD_SIZE, lanes)
    return tiles.swapaxes(2, 3).reshape(-1, session.context, HEAD_SIZE)


def overwrite(session: Session, buffer: str, positions: slice, generator: np.random.Generator) -> None:
    """Put random numbers at some positions of a cache."""
    bits = by_position(session, buffer).copy()
    bits[:, positions] = generator.standard_normal(bits[:, positions].shape).astype(np.float16).view(np.uint16)
    if buffer.endswith("k"):
        lanes = best_level(host_features()).lanes
        bits = bits.reshape(len(bits), session.context // lanes, lanes, HEAD_SIZE).swapaxes(2, 3)
    write(session, buffer, bits)


def cache_buffers(session: Session) -> list[str]:
    return [name for name, buffer in session._plan.buffers.items() if buffer.role == "cache"]


def committed(session: Session) -> dict[str, np.ndarray]:
    """Keys and values of the committed tokens, of target and drafter, by buffer."""
    return {name: by_position(session, name)[:, : len(session.tokens)] for name in cache_buffers(session)}


def same_committed(a: Session, b: Session) -> bool:
    """Whether two sessions hold the same tokens with the same bits of keys and values."""
    ours, theirs = committed(a), committed(b)
    return a.tokens == b.tokens and ours.keys() == theirs.keys() and all(
        np.array_equal(ours[name], theirs[name]) for name in ours)


@dataclass(frozen=True)
class Block:
    """What a drafter made of a block: the proposals, and the residual stream of its rows up to them, float32."""

    proposals: list[int]
    residual: np.ndarray

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, Block) and self.proposals == other.proposals
                and self.residual.tobytes() == other.residual.tobytes())


def block(session: Session, anchor: int, width: int) -> Block:
    """Draft behind the committed tokens, and nothing more."""
    session._device_anchor = None
    session._set_anchor(anchor)
    run(session, *round_programs(width, session._block_rows)[:3])
    residual = read(session, "drafter.residual", "float32").reshape(16, -1)[: width + 1]
    return Block(read(session, "tokens", "int32")[1 : width + 1].tolist(), residual)


@dataclass
class Traffic:
    """Bytes to the device, bytes from it, and waits."""

    uploaded: int
    downloaded: int
    synchronisations: int


@contextmanager
def traffic(session: Session) -> Iterator[Traffic]:
    """Counts what passes between host and device."""
    device = session._device
    counted = Traffic(device.uploaded, device.downloaded, device.synchronisations)
    yield counted
    counted.uploaded = device.uploaded - counted.uploaded
    counted.downloaded = device.downloaded - counted.downloaded
    counted.synchronisations = device.synchronisations - counted.synchronisations
