"""The K and V caches of a build: which buffers there are, where in them each layer's lie, and how much they hold.

Layers that see the whole context keep it. Layers with a window have a ring: room for the window and for all rows that a
program stores before the first of them looks back. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflashc.compiler.drafter.config import PREFIX, DrafterConfig
from dflashc.compiler.models.config import ModelConfig
from dflashc.compiler.models.graph import cache_name
from dflashc.runtime.errors import BuildError
from dflashc.runtime.kv_types import KV_TYPES, kv_bytes
from dflashc.runtime.plan import CONTEXT_STEP, Buffer, Operand
from dflashc.targets.base import Target
from dflashc.targets.context import Cache


@dataclass(frozen=True)
class Caches:
    """All caches of a model or a pair: their buffers, and each one by parameter name."""

    buffers: tuple[Buffer, ...]
    by_name: Mapping[str, Cache]


def plan_caches(target: Target, config: ModelConfig, kv_type: str, drafter: DrafterConfig | None, drafter_kv_type: str,
                context: int, rows: int) -> Caches:
    """The caches of a model and, of a pair, its drafter, each in a type of its own.

    A layer of the model has buffers of its own. Layers of the drafter with the same window share one for K and one for
    V, so that one launch can fill them.

    Parameters
    ----------
    context : int
        Largest context capacity.
    rows : int
        Of the largest program.

    Raises
    ------
    BuildError
        The target does not have the type, or nobody has it for heads of this size.
    """
    buffers: list[Buffer] = []
    by_name: dict[str, Cache] = {}
    size = _bytes_per_token(target, config, kv_type)
    for layer, window in enumerate(config.layer_windows):
        kind = _Kind(kv_type, size, window, ring_slots(window, context, rows))
        for name in (cache_name("", layer, which) for which in "kv"):
            buffers.append(kind.buffer(name, 1))
            by_name[name] = kind.cache(name, 0)
    if drafter is not None:
        size = _bytes_per_token(target, drafter, drafter_kv_type)
        for window in sorted(set(drafter.layer_windows)):
            kind = _Kind(drafter_kv_type, size, window, ring_slots(window, context, rows))
            layers = [layer for layer, own in enumerate(drafter.layer_windows) if own == window]
            for which in "kv":
                shared = f"{PREFIX}cache.{which}" if not window else f"{PREFIX}ring.{window}.{which}"
                buffers.append(kind.buffer(shared, len(layers)))
                by_name |= {cache_name(PREFIX, layer, which): kind.cache(shared, i) for i, layer in enumerate(layers)}
    return Caches(tuple(buffers), by_name)


def ring_slots(window: int, context: int, rows: int) -> int:
    """Tokens that a ring for layers with this window holds; 0 without a window, or where it saves nothing.

    The first of `rows` rows still sees window - 1 tokens before it when the last one is stored. So rows that are
    rejected later cost no token that a window shows, and a rewind by as many is free.
    """
    slots = -(-(window - 1 + rows) // CONTEXT_STEP) * CONTEXT_STEP
    return slots if window and slots < context else 0


@dataclass(frozen=True)
class _Kind:
    """What caches that lie in one buffer have in common; `slots` is 0 where they hold the whole context."""

    type: str
    bytes_per_token: int
    window: int
    slots: int

    def buffer(self, name: str, layers: int) -> Buffer:
        size = layers * self.bytes_per_token
        if self.slots:
            return Buffer(name, "cache", self.slots * size, 0, self.window, self.slots)
        return Buffer(name, "cache", 0, size)

    def cache(self, buffer: str, index: int) -> Cache:
        """The cache of layer number `index` of those in the buffer."""
        offset = index * self.bytes_per_token
        if self.slots:
            return Cache(self.type, Operand("buffer", buffer, self.slots * offset), Operand("i64", "", self.slots))
        return Cache(self.type, Operand("buffer", buffer, 0, offset), Operand("context"))


def _bytes_per_token(target: Target, config: ModelConfig | DrafterConfig, kv_type: str) -> int:
    """Bytes of a layer's K, or V, of one token."""
    if kv_type not in target.kv_types:
        raise BuildError(f"K/V type {kv_type!r} was asked for; target {target.name} has {', '.join(target.kv_types)}")
    block, _ = KV_TYPES[kv_type]
    if config.head_size % block:
        raise BuildError(f"attention heads of {config.head_size} elements found; K/V type {kv_type} needs a multiple "
                         f"of {block}: use f16")
    return kv_bytes(kv_type, config.kv_heads * config.head_size)
