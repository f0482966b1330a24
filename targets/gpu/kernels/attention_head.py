"""Heads' vectors on their way into attention: RMS norm and rotary embedding, 16 vectors at a time by a workgroup.

Every vector is computed by 16 threads in an order that depends on the head size alone. Knows nothing of softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from dflashc.targets.gpu.builder import (
    Expr,
    barrier,
    bind,
    f32,
    fma,
    i32,
    load,
    local,
    select,
    store,
)
from dflashc.targets.gpu.kernels.reduction import add, tree

THREADS = 256
VECTORS = 16
"""Vectors that a workgroup of 256 threads takes at a time."""
LANES = THREADS // VECTORS
"""Threads of a vector; head sizes are multiples of it."""


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm over one head: weight float32 (D,) from element `first` on, epsilon float32."""

    weight: Expr
    epsilon: Expr
    first: Expr | int = 0


@dataclass(frozen=True)
class Rotation:
    """Rotary table float32 (2, rows, pairs), cosines before sines, and the pairing of dimensions.

    "neox" rotates (i, i + pairs), "norm" (2i, 2i + 1), for i < pairs; dimensions from 2 * pairs on pass through.
    """

    pairing: str
    table: Expr
    rows: Expr
    pairs: Expr

    def angle(self, row: Expr, dimension: Expr) -> tuple[Expr, Expr, Expr]:
        """(partner, c, s) of a dimension d: rotated[d] = x[d] * c + x[partner] * s."""
        if self.pairing == "neox":
            first = bind(dimension < self.pairs)
            partner = select(first, dimension + self.pairs, dimension - self.pairs)
            pair = select(first, dimension, dimension - self.pairs)
        else:
            first = bind((dimension & i32(1)) == i32(0))
            partner, pair = dimension ^ i32(1), tirx.shift_right(dimension, i32(1))
        rotates = bind(dimension < self.pairs * 2)
        at = bind(select(rotates, row * self.pairs + pair, i32(0)))
        cosine, sine = load(self.table, at), bind(load(self.table, self.rows * self.pairs + at))
        signed = select(first, f32(0) - sine, sine)
        return (bind(select(rotates, partner, dimension)), bind(select(rotates, cosine, f32(1))),
                bind(select(rotates, signed, f32(0))))


@dataclass(frozen=True)
class HeadVector:
    """factor * rotate(norm(source[start:][:D])) with the tables' row `row`, one element at a time."""

    source: Expr
    start: Expr
    row: Expr
    rotation: Rotation
    norm: HeadNorm | None
    scale: Expr

    def element(self, dimension: Expr) -> Expr:
        """Element `dimension` of the result."""
        partner, c, s = self.rotation.angle(self.row, dimension)
        return bind(fma(self._normed(dimension), c, self._normed(partner) * s))

    def _normed(self, dimension: Expr) -> Expr:
        value = load(self.source, self.start + dimension)
        if self.norm is not None:
            value = value * load(self.norm.weight, self.norm.first + dimension)
        return bind(value * self.scale)


def head_vector(size: int, scratch: Expr, thread: Expr, source: Expr, start: Expr, row: Expr, rotation: Rotation,
                norm: HeadNorm | None, factor: Expr) -> HeadVector:
    """Prepare vector thread / 16 of 16. All threads of the workgroup must call it: there is a barrier inside.

    Parameters
    ----------
    scratch : shared float32 (256,)
        Free again after the next barrier.
    start, row : int32
        Of this thread's vector; they must exist, even where the result is not wanted.
    """
    if norm is None:
        return HeadVector(source, start, row, rotation, norm, factor)
    lane = bind(tirx.truncmod(thread, i32(LANES)))
    squares = local(1, "float32")
    store(squares, 0, f32(0))
    for i in range(size // LANES):
        x = bind(load(source, start + lane + i * LANES))
        store(squares, 0, fma(x, x, load(squares, 0)))
    store(scratch, thread, load(squares, 0))
    barrier()
    total = tree([bind(load(scratch, thread - lane + i)) for i in range(LANES)], add)
    root = bind(tirx.sqrt(total * f32(1 / size) + norm.epsilon))
    return HeadVector(source, start, row, rotation, norm, bind(factor / root))
