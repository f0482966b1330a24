"""The K and V caches of a build: which buffers there are, and where in them each layer's lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflashc.compiler.drafter.config import PREFIX, DrafterConfig
from dflashc.compiler.models.config import ModelConfig
from dflashc.compiler.models.graph import cache_name
from dflashc.runtime.errors import BuildError
from dflashc.runtime.kv_types import KV_TYPES, kv_bytes
from dflashc.runtime.plan import Buffer, Operand
from dflashc.targets.base import Target
from dflashc.targets.context import Cache


@dataclass(frozen=True)
class Caches:
    """All caches of a model or a pair: their buffers, and each one by parameter name."""

    buffers: tuple[Buffer, ...]
    by_name: Mapping[str, Cache]


def plan_caches(target: Target, config: ModelConfig, kv_type: str, drafter: DrafterConfig | None,
                drafter_kv_type: str) -> Caches:
    """The caches of a model and, of a pair, its drafter, each in a type of its own.

    A layer of the model has buffers of its own. All layers of the drafter share one for K and one for V, so that one
    launch can fill them.

    Raises
    ------
    BuildError
        The target does not have the type, or nobody has it for heads of this size.
    """
    buffers: list[Buffer] = []
    by_name: dict[str, Cache] = {}
    size = _bytes_per_token(target, config, kv_type)
    for name in (cache_name("", layer, which) for layer in range(config.layers) for which in "kv"):
        buffers.append(Buffer(name, "cache", 0, size))
        by_name[name] = Cache(kv_type, Operand("buffer", name), Operand("context"))
    if drafter is not None:
        size = _bytes_per_token(target, drafter, drafter_kv_type)
        for which in "kv":
            shared = f"{PREFIX}cache.{which}"
            buffers.append(Buffer(shared, "cache", 0, drafter.layers * size))
            for layer in range(drafter.layers):
                begin = Operand("buffer", shared, 0, layer * size)
                by_name[cache_name(PREFIX, layer, which)] = Cache(drafter_kv_type, begin, Operand("context"))
    return Caches(tuple(buffers), by_name)


def _bytes_per_token(target: Target, config: ModelConfig | DrafterConfig, kv_type: str) -> int:
    """Bytes of a layer's K, or V, of one token."""
    if kv_type not in target.kv_types:
        raise BuildError(f"K/V type {kv_type!r} was asked for; target {target.name} has {', '.join(target.kv_types)}")
    block, _ = KV_TYPES[kv_type]
    if config.head_size % block:
        raise BuildError(f"attention heads of {config.head_size} elements found; K/V type {kv_type} needs a multiple "
                         f"of {block}: use f16")
    return kv_bytes(kv_type, config.kv_heads * config.head_size)
