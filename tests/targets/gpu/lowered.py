"""Runs a lowered program launch by launch on a Vulkan device, over buffers in host memory."""

from __future__ import annotations

import numpy as np

from dflashc.compiler.lower.program import LoweredProgram
from dflashc.runtime.plan import Operand
from dflashc.targets.gpu.traits import Traits
from tests.targets.gpu.running import run_kernel


def run_program(lowered: LoweredProgram, memory: dict[str, np.ndarray], traits: Traits, context: int) -> None:
    """Run the launches in their order on `memory`, the uint8 contents of buffers and weights by name.

    What a kernel leaves as it was is not written back: its operands may lie in one buffer.
    """
    for launch in lowered.program.launches:
        assert launch.units.divisor == 0, launch
        kernel = lowered.requests[launch.kernel].build(traits)
        arguments, places = [], []
        for operand, argument in zip(launch.operands, kernel.arguments, strict=True):
            if argument.is_scalar:
                arguments.append(_scalar(operand, context))
                continue
            assert operand.offset(context) % 64 == 0, launch
            place = memory[operand.name][operand.offset(context) :]
            places.append(place)
            arguments.append(place[: len(place) // 8 * 8].view(argument.kind))
        before = [place.copy() for place in places]
        for place, old, new in zip(places, before, run_kernel(kernel, arguments, launch.units.multiple), strict=True):
            result = new.view(np.uint8)
            changed = result != old[: len(result)]
            place[: len(result)][changed] = result[changed]


def _scalar(operand: Operand, context: int) -> float:
    assert operand.kind in ("i64", "f32", "context"), operand
    return context if operand.kind == "context" else operand.value
