"""One head's vector on its way into attention: RMS norm, rotary embedding, the K and V caches.

Owns the layout of the caches. Knows nothing of softmax.

K cache: float16 [kv_heads][capacity / L][D][L], L = lanes: a vector is L keys of one dimension, so scores need no
horizontal sums. V cache: float16 [kv_heads][capacity][D]. Both have the rows of one head's first `key` keys, key a
multiple of L, before element (head * capacity + key) * D.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, cast, const, load, local, store
from dflashc.targets.cpu.traits import Traits, broadcast, intrinsic


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm over one head: weight float32 (D,), epsilon float32."""

    weight: Expr
    epsilon: Expr


@dataclass(frozen=True)
class Rotation:
    """Rotary tables, float32 (rows, pairs), and the pairing of dimensions.

    "neox" rotates (i, i + pairs), "norm" (2i, 2i + 1), for i < pairs; dimensions from 2 * pairs on pass through.
    """

    pairing: str
    cosine: Expr
    sine: Expr
    pairs: Expr


def _emit_scaled(traits: Traits, size: int, source: Expr, offset: Expr, norm: HeadNorm | None, factor: Expr | None,
                 target: Expr) -> None:
    """target[:size] = source[offset:][:size], normed and times `factor`."""
    lanes = traits.lanes
    scale = factor
    if norm is not None:
        squares = local(lanes, "float32")
        store(squares, 0, const(0, traits.f32), lanes)
        with T.serial(0, size // lanes) as i:
            x = bind(load(source, offset + i * lanes, lanes))
            store(squares, 0, traits.fma(x, x, load(squares, 0, lanes)), lanes)
        total = bind(intrinsic("float32", "llvm.vector.reduce.fadd", const(0, "float32"), load(squares, 0, lanes)))
        root = bind(intrinsic("float32", "llvm.sqrt", total * const(1 / size, "float32") + norm.epsilon))
        scale = bind((const(1, "float32") if factor is None else factor) / root)
    with T.serial(0, size // lanes) as i:
        value = load(source, offset + i * lanes, lanes)
        if norm is not None:
            value = value * load(norm.weight, i * lanes, lanes)
        store(target, i * lanes, value if scale is None else value * broadcast(scale, lanes), lanes)


def _emit_rotated(size: int, source: Expr, row: Expr, rotation: Rotation, target: Expr, offset: Expr) -> None:
    """target[offset:][:size] = source[:size], rotated. Plain loops: two separate buffers, so LLVM vectorises them."""
    pairs = rotation.pairs
    with T.serial(0, pairs) as i:
        first, second = (i, i + pairs) if rotation.pairing == "neox" else (2 * i, 2 * i + 1)
        c, s = bind(load(rotation.cosine, row * pairs + i)), bind(load(rotation.sine, row * pairs + i))
        x, y = bind(load(source, first)), bind(load(source, second))
        store(target, offset + first, x * c - y * s)
        store(target, offset + second, x * s + y * c)
    with T.serial(2 * pairs, size) as i:
        store(target, offset + i, load(source, i))


def emit_head(traits: Traits, size: int, source: Expr, offset: Expr, row: Expr, rotation: Rotation,
              norm: HeadNorm | None, factor: Expr | None, target: Expr, target_offset: Expr) -> None:
    """target[target_offset:][:size] = factor * rotate(norm(source[offset:][:size])) with the tables' row `row`."""
    scaled = local(size, "float32")
    _emit_scaled(traits, size, source, offset, norm, factor, scaled)
    _emit_rotated(size, scaled, row, rotation, target, target_offset)


def emit_cache_key(traits: Traits, size: int, key: Expr, cache: Expr, base: Expr, position: Expr) -> None:
    """Write the float32 vector key[:size] as key number `position` of the head whose K cache starts at `base`."""
    lanes = traits.lanes
    half = local(size, "float16")
    with T.serial(0, size // lanes) as i:
        store(half, i * lanes, cast(f"float16x{lanes}", load(key, i * lanes, lanes)), lanes)
    lane = bind(tirx.truncmod(position, lanes))
    start = bind(base + (position - lane) * size + lane)
    with T.serial(0, size) as i:
        store(cache, start + i * lanes, load(half, i))


def emit_cache_value(traits: Traits, size: int, source: Expr, offset: Expr, cache: Expr, base: Expr,
                     position: Expr) -> None:
    """Write source[offset:][:size] as value number `position` of the head whose V cache starts at `base`."""
    lanes = traits.lanes
    with T.serial(0, size // lanes) as i:
        value = load(source, offset + i * lanes, lanes)
        store(cache, base + position * size + i * lanes, cast(f"float16x{lanes}", value), lanes)
