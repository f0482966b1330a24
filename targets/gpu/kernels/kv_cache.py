"""The types that K and V caches are stored in on GPUs, by name."""

from __future__ import annotations

from collections.abc import Callable

from dflashc.targets.gpu.kernels.kv_f16 import Float16
from dflashc.targets.gpu.kernels.kv_q8_0 import MULTIPLE, Q8
from dflashc.targets.gpu.kernels.kv_type import KvType
from dflashc.targets.gpu.traits import Traits

KV_TYPES: dict[str, Callable[[Traits, int], KvType]] = {"f16": Float16, "q8_0": Q8}

HEAD_MULTIPLES = {"f16": 16, "q8_0": MULTIPLE}
"""What heads are multiples of, by K/V type."""


def kv_type(name: str, traits: Traits, size: int) -> KvType:
    """The K/V type `name` for heads of `size` elements."""
    return KV_TYPES[name](traits, size)
