"""One head's vector on its way into attention: RMS norm, rotary embedding. Knows nothing of caches or softmax."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Expr, bind, const, load, local, store
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

