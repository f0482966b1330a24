"""Artefacts built and run: what the proofs ask of a session.

Knows the session's interface; knows nothing of what is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dflashc.compiler.build import BuildOptions, build
from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.device.cpu import CpuDevice
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.session import Session

GREEDY = SamplingParameters(temperature=0.0)
VERIFY = 16  # rows of the largest program that gives the logits of all its rows


def build_artefact(model: Path, folder: Path, context: int = 1024, target: str = "cpu") -> Path:
    """An artefact, by default for the best level of this CPU."""
    output = folder / f"{model.stem}.dflash"
    build(BuildOptions(model, target, output, context=context))
    return output


@contextmanager
def device_of(artefact: Path, threads: int = 2) -> Iterator[CpuDevice]:
    device = CpuDevice(load_artefact(artefact).kernels, threads)
    try:
        yield device
    finally:
        device.close()


@contextmanager
def session_of(artefact: Path, context: int = 1024, threads: int = 2) -> Iterator[Session]:
    """A session on a device of its own."""
    with device_of(artefact, threads) as device:
        yield Session(load_artefact(artefact), device, context)


def logits_along(session: Session, ids: Sequence[int], rows: int = VERIFY) -> np.ndarray:
    """Logits (len(ids), vocabulary) after every token of a text, by programs of up to `rows` rows; float32."""
    session.rewind(0)
    pieces = []
    for start in range(0, len(ids), rows):
        piece = ids[start : start + rows]
        session.decode(piece, "logits", 0, len(piece))
        pieces.append(session.logits(len(piece)))
    return np.concatenate(pieces)


def greedy(session: Session, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens."""
    session.rewind(0)
    return list(session.generate(prompt, GREEDY, count))


def cache_bytes(session: Session) -> dict[str, np.ndarray]:
    """All keys and values of a session, of positions not yet reached too, by buffer name."""
    plan, memories, device = session._plan, session._memories, session._device
    return {name: device.download(memories[name], "uint8", memories[name].nbytes)
            for name, buffer in plan.buffers.items() if buffer.role == "cache"}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
