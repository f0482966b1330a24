"""Buffers have room for what programs put there."""

from contextlib import closing
from pathlib import Path

import pytest
from tvm import relax, tirx

from dflashc.compiler.build import BuildOptions, lower
from dflashc.runtime.plan import Buffer, Operand
from dflashc.targets.context import ProgramContext

ROWS, COLUMNS = 256, 3 * 256  # the longest program, and three taps of the shipped pair's target


@pytest.mark.parametrize(("target", "sums"), [("cpu", 32), ("vulkan", 16), ("cuda-sm89", 16), ("rocm-gfx1151", 16)])
def test_features_of_the_longest_program(target: str, sums: int, pycode_model: Path, pycode_drafter: Path,
                                         tmp_path: Path) -> None:
    """Codes, a scale of every 32, and a sum of every 32 on CPUs, of every 16 on GPUs."""
    with closing(lower(BuildOptions(pycode_model, target, tmp_path / "none", pycode_drafter))) as lowered:
        found = [lowered.plan.buffers[f"features.{i}"].bytes for i in range(3)]
    assert found == [ROWS * COLUMNS, ROWS * COLUMNS // 32 * 4, ROWS * COLUMNS // sums * 4]


def test_a_value_that_does_not_fit_is_an_error() -> None:
    """4 rows of 8 floats are 128 bytes; of two parts each has to fit."""
    context = ProgramContext(4, {}, shared={"small": Buffer("small", "scratch", 128)})
    value = relax.TensorType((tirx.Var("m", "int64"), 8), "float32")
    context.require_room(value, Operand("buffer", "small"))
    context.require_room(relax.TupleType([value, value]), [Operand("buffer", "small"), Operand("buffer", "small")])
    with pytest.raises(AssertionError, match="128 bytes for 4 rows do not fit the 124 of buffer small"):
        context.require_room(value, Operand("buffer", "small", 4))
    context.rows = 5
    with pytest.raises(AssertionError, match="160 bytes"):
        context.require_room(relax.TupleType([value, value]), [Operand("weight", "w"), Operand("buffer", "small")])
