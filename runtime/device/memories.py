"""The memory of a session: the buffers of its plan, and the weights of its artefact.

Knows which buffers the host reads; nothing of any device.
"""

from __future__ import annotations

from dflashc.runtime.artefact import Artefact
from dflashc.runtime.device.base import AnyMemory, Device

SHARED_BYTES = 64 << 10
"""Outputs up to this size are read after every round; larger ones, the logits, only by samplers on the host."""


def session_memories(artefact: Artefact, device: Device[AnyMemory], context: int) -> dict[str, AnyMemory]:
    """Zeroed buffers and the weights, by the names that launches use.

    Views are left out, since they are chosen when a run is recorded. Raises `TargetError` where the device has not the
    room, before anything is allocated.
    """
    device.check_memory(artefact, context)
    memories = {}
    for name, buffer in artefact.plan.buffers.items():
        if buffer.role != "view":
            size = buffer.size(context)
            memories[name] = device.alloc(size, shared=buffer.role == "output" and size <= SHARED_BYTES)
    return memories | dict(device.weights(artefact))
