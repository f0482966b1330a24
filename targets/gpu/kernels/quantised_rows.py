"""Rows of floats in shared memory, stored in a matmul's activation form.

One definition of the 8-bit form for every kernel that ends with it: symmetric, 32 elements a scale, as
`passes.operators.FORMS` lists it. Knows nothing of where the floats come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, bind, f32, i32, load, select, store
from dflashc.targets.gpu.kernels.exact_floats import nearest
from dflashc.targets.gpu.kernels.reduction import add, tree

GROUP = 32
"""Elements that share a scale."""
PITCH = GROUP + 1
"""Floats from one group in shared memory to the next, so that threads reading groups meet different banks."""

_TINY = 1e-36  # below it 127 / max|x| would overflow; such a group is stored as zeros


def form_arguments(form: str, prefix: str) -> list[tuple[str, str]]:
    """The buffers of a form as a kernel's arguments; codes as words of four."""
    if form == "f32":
        return [(f"{prefix}_values", "float32")]
    return [(f"{prefix}_codes", "int32"), (f"{prefix}_scale", "float32"), (f"{prefix}_sums", "int32")]


def emit_group(source: Expr, first: Expr, buffers: Sequence[Expr], group: Expr) -> None:
    """One thread stores the 32 floats of `source` from `first` on as group `group` (counted over the whole matrix).

    `buffers` are codes, scale and, unless nobody needs them, sums.
    """
    codes, scale, *sums = buffers
    values = [bind(load(source, first + j)) for j in range(GROUP)]
    largest = tree([bind(tirx.abs(v)) for v in values], tirx.max)
    normal = bind(largest > f32(_TINY))
    store(scale, group, select(normal, largest / f32(127), f32(0)))
    inverse = bind(select(normal, f32(127) / largest, f32(0)))
    integers = [nearest(bind(v * inverse))[0] for v in values]
    for word in range(GROUP // 4):
        parts = [tirx.shift_left(integers[word * 4 + j] & i32(0xFF), i32(8 * j)) for j in range(4)]
        store(codes, group * (GROUP // 4) + word, parts[0] | parts[1] | parts[2] | parts[3])
    for buffer in sums:
        for half in range(2):
            store(buffer, group * 2 + half, tree(integers[half * 16 : half * 16 + 16], add))
