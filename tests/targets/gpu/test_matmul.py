"""Matmuls of every packed format on a Vulkan device, against NumPy with the same quantised activations."""

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.gated import gated_matmul
from dflashc.targets.gpu.kernels.matmul import matmul, matmul_argmax, units
from dflashc.targets.gpu.kernels.row_groups import ROWS, SLICES, activation_form
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS, pack_rows, packed_format
from tests.targets import samples
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")
WEIGHT_ROWS, COLUMNS = 37, 512  # rows that fill no workgroup; 16 blocks of K for 8 slices
LEADING, COLUMN = 50, 5


class Case:
    """A weight of a GGUF type and 32 rows of quantised activations."""

    def __init__(self, type_name: str, byte: int | None = None, weight_rows: int = WEIGHT_ROWS,
                 columns: int = COLUMNS) -> None:
        rng = np.random.default_rng([4, weight_rows])
        self.layout = packed_format(type_name).format
        self.form = activation_form(self.layout)
        self.columns, self.weight_rows = columns, weight_rows
        blocks = samples.random_blocks(type_name, weight_rows, columns, rng, byte)
        self.packed = pack_rows(type_name, blocks, columns, LANES).view(np.uint32)
        self.weights = samples.dequantise(type_name, blocks).astype(np.float64)
        values = rng.standard_normal((32, columns)).astype(np.float32)
        if byte is not None:
            values = np.sign(values[:, :1]) * np.ones_like(values)
        self.inputs = samples.quantise(values, self.form)
        self.bias = rng.standard_normal(weight_rows).astype(np.float32)

    def expected(self) -> np.ndarray:
        return samples.values_of(self.inputs, self.form) @ self.weights.T

    def operands(self, rows: int) -> list[np.ndarray]:
        """The activation's buffers for the first `rows` rows, codes as words of four."""
        first = [np.ascontiguousarray(b[:rows]) for b in self.inputs]
        return first if self.form == "f32" else [first[0].view(np.int32), *first[1:]]

    def run(self, rows: int, compiled: int, epilogue: str = "store", slices: int = SLICES) -> np.ndarray:
        """The outputs; checks that nothing around them is written."""
        kernel = matmul(TRAITS, self.layout.name, compiled, epilogue, slices)
        output = np.full((rows + 1, LEADING), 7, np.float32)
        *_, output = run_kernel(
            kernel, [*self.operands(rows), self.packed, *([self.bias] if epilogue == "store_bias" else []), output,
                     rows // compiled, self.columns, self.weight_rows, LEADING, COLUMN],
            units(rows, self.weight_rows, compiled))
        found = output[:rows, COLUMN : COLUMN + self.weight_rows].copy()
        output[:rows, COLUMN : COLUMN + self.weight_rows] = 7
        assert (output == 7).all()
        return found


@pytest.mark.parametrize("type_name", samples.TYPE_NAMES)
def test_products(type_name: str) -> None:
    """Close to the reference; each row the same bits in a pass of 1, 3 and 16 rows, and in the second of two passes."""
    case = Case(type_name)
    expected = case.expected()
    whole = case.run(32, 16)
    np.testing.assert_allclose(whole, expected, atol=4e-6 * np.abs(expected).max(), rtol=0)
    for rows in (1, 3):
        np.testing.assert_array_equal(case.run(rows, rows), whole[:rows])


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x88])
@pytest.mark.parametrize("type_name", [t for t in samples.TYPE_NAMES if packed_format(t).format.family != "float"])
def test_extreme_integers(type_name: str, byte: int) -> None:
    """Largest codes against activations of +-127 throughout: no intermediate sum may saturate."""
    case = Case(type_name, byte)
    expected = case.expected()
    np.testing.assert_allclose(case.run(2, 2), expected[:2], atol=4e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "F16"])
def test_rows_are_independent(type_name: str) -> None:
    """Every number of rows from 1 to 16 gives the same bits."""
    case = Case(type_name)
    whole = case.run(16, 16)
    for rows in range(1, 16):
        np.testing.assert_array_equal(case.run(rows, rows), whole[:rows])


@pytest.mark.parametrize("type_name", ["Q6_K", "F16"])
def test_other_numbers_of_slices(type_name: str) -> None:
    """Close to the reference, and the same bits whatever the number of rows."""
    case = Case(type_name)
    expected = case.expected()
    whole = case.run(16, 16, slices=4)
    np.testing.assert_allclose(whole, expected[:16], atol=4e-6 * np.abs(expected).max(), rtol=0)
    for rows in (1, 8):
        np.testing.assert_array_equal(case.run(rows, rows, slices=4), whole[:rows])


def test_bias() -> None:
    case = Case("Q4_0")
    np.testing.assert_array_equal(case.run(3, 3, "store_bias"), case.run(3, 3) + case.bias)


def test_fewer_blocks_than_slices() -> None:
    case = Case("Q8_0", columns=32)
    np.testing.assert_allclose(case.run(2, 2), case.expected()[:2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("compiled", [5, 16])
def test_argmax_parts(compiled: int) -> None:
    """The best of each 32 weight rows, the lowest on ties: all rows of a zero activation tie."""
    case = Case("Q8_0")
    rows = 2 * compiled if compiled == 16 else compiled
    codes = case.inputs[0]
    codes[1] = 0
    case.inputs[2][1] = 0
    products = case.run(rows, compiled)
    kernel = matmul_argmax(TRAITS, "q8_0", compiled)
    parts = -(-WEIGHT_ROWS // ROWS)
    *_, value, index = run_kernel(kernel, [*case.operands(rows), case.packed, np.zeros((parts, rows), np.float32),
                                           np.zeros((parts, rows), np.int32), COLUMNS, WEIGHT_ROWS, rows],
                                  units(rows, WEIGHT_ROWS, compiled))
    for part in range(parts):
        inside = products[:, part * ROWS : (part + 1) * ROWS]
        np.testing.assert_array_equal(index[part], part * ROWS + inside.argmax(axis=1))
        np.testing.assert_array_equal(value[part], inside.max(axis=1))


GATES = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize(("type_name", "activation", "form"), [
    ("Q4_K", "silu", "q8_32s"), ("Q8_0", "gelu", "q8_32s"), ("F16", "silu", "f32"),
])
def test_gated(type_name: str, activation: str, form: str) -> None:
    outputs = 64
    gate, up = Case(type_name, weight_rows=outputs), Case(type_name, weight_rows=outputs + 32)
    up.inputs = gate.inputs
    expected = GATES[activation](gate.expected()) * up.expected()[:, :outputs]
    results = {}
    for rows, compiled in ((32, 16), (3, 3)):
        buffers = samples.empty_form(form, rows, outputs)
        ran = run_kernel(gated_matmul(TRAITS, gate.layout.name, compiled, activation, form),
                         [*gate.operands(rows), gate.packed, up.packed, *buffers, rows // compiled, COLUMNS,
                          outputs],
                         units(rows, outputs, compiled))
        results[rows] = ran[-len(buffers):]
    for many, few in zip(results[32], results[3], strict=True):
        np.testing.assert_array_equal(many[:3], few)
    samples.assert_stands_for(results[32], form, expected)


def test_every_format_is_tested() -> None:
    assert {packed_format(t).format.name for t in samples.TYPE_NAMES} == set(PACKED_FORMATS)
