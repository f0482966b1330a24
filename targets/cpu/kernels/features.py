"""Target taps into the wide activation that the drafter's fusion reads, each at its own columns.

Knows nothing of which layers are tapped, nor of the fusion.
"""

from __future__ import annotations

from dflashc.targets.cpu.builder import Kernel, KernelBuilder, bind
from dflashc.targets.cpu.kernels.activation import declare_form, emit_quantise
from dflashc.targets.cpu.traits import Traits


def features(traits: Traits, form: str) -> Kernel:
    """output[m, column + c] = input[m, c], stored in `form`. Unit = one row m.

    Arguments: input float32 (M, C), the buffers of the output (M, leading); then the scalars columns (C), leading,
    column. All three are multiples of the form's group, and C of 32.
    """
    k = KernelBuilder(f"features_{form}", traits)
    with k.build():
        source = k.buffer("input", "float32")
        outputs = declare_form(k, form, "output")
        columns, leading, column = k.scalar("columns"), k.scalar("leading"), k.scalar("column")
        with k.units() as row:
            element = bind(row * leading + column)
            emit_quantise(traits, form, source, bind(row * columns), columns, outputs, element)
    return k.kernel
