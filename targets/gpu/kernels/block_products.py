"""What a block of 32 adds to an inner product: exact integers first, then multiply-adds in float32.

The one definition for every kernel that multiplies packed weights: equal dot products give equal bits, however they
were found.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflashc.targets.gpu.builder import Expr, bind, fma
from dflashc.targets.gpu.kernels.codes import BlockScales


def add_block(scales: BlockScales, dots: Sequence[Expr], input_scale: Expr, input_sums: Sequence[Expr],
              total: Expr) -> Expr:
    """The total with one block more, float32.

    Parameters
    ----------
    dots : float32 expressions
        The dot product of codes and activation codes, of each part; exact.
    input_scale : float32
        Of the block's activation codes.
    input_sums : float32 expressions
        The sum of these codes times `input_scale`, of each part; read where the format has a minimum.
    """
    for dot, scale in zip(dots, scales.factors, strict=True):
        total = bind(fma(dot, bind(scale * input_scale), total))
    for minimum, input_sum in zip(scales.minima, input_sums, strict=True):
        total = bind(fma(minimum, input_sum, total))
    return total
