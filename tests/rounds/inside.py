"""Looks inside a session: caches by position, the result of a block, what a run costs the host.

Every model here has heads of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dflashc.runtime.kv_types import kv_bytes
from dflashc.runtime.rounds import round_programs
from dflashc.runtime.session import Session
from dflashc.targets.cpu.traits import best_level, host_features
from tests.caches import by_slot, encode, in_memory

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


def _layout(session: Session, buffer: str) -> tuple[str, str, int, int]:
    """How a cache lies in memory, as `tests.caches` takes it: type, "k" or "v", head size, lanes."""
    of = session._plan.buffers[buffer]
    per_token = of.bytes // of.slots if of.slots else of.bytes_per_token
    kv = "f16" if per_token % kv_bytes("f16", HEAD_SIZE) == 0 else "q8_0"
    return kv, buffer[-1], HEAD_SIZE, best_level(host_features()).lanes


def slots_of(session: Session, buffer: str) -> np.ndarray:
    """Bytes of a cache by slot, uint8 (KV heads, slots, bytes of a key or value)."""
    kv, which, size, lanes = _layout(session, buffer)
    count = session._plan.buffers[buffer].slots or session.context
    return by_slot(read(session, buffer, "uint8").reshape(-1, count * kv_bytes(kv, size)), kv, which, size, lanes)


def overwrite(session: Session, buffer: str, positions: slice, generator: np.random.Generator) -> None:
    """Put random numbers at some positions of a cache, none of them beyond its slots."""
    kv, which, size, lanes = _layout(session, buffer)
    slots = slots_of(session, buffer).copy()
    numbers = generator.standard_normal((*slots[:, positions].shape[:2], size), np.float32)
    slots[:, positions] = encode(numbers, kv, which, lanes)
    write(session, buffer, in_memory(slots, kv, which, size, lanes))


def cache_buffers(session: Session) -> list[str]:
    return [name for name, buffer in session._plan.buffers.items() if buffer.role == "cache"]


def committed(session: Session) -> dict[str, np.ndarray]:
    """Keys and values of the committed tokens, of target and drafter, by buffer; of a ring those that the next sees."""
    result, length = {}, len(session.tokens)
    for name in cache_buffers(session):
        window, slots = session._plan.buffers[name].window, slots_of(session, name)
        first = max(0, length - window + 1) if window else 0
        result[name] = slots[:, np.arange(first, length) % slots.shape[1]]
    return result


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
