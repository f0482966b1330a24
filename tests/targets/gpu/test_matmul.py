"""Matmuls of every packed format on a Vulkan device, against NumPy with the same quantised activations."""

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.row_groups import ROWS
from dflashc.targets.gpu.kernels.shares import Share
from dflashc.targets.packing import PACKED_FORMATS, packed_format
from tests.targets import samples
from tests.targets.gpu.matmul_case import WEIGHT_ROWS, Case, GatedCase


@pytest.mark.parametrize("type_name", samples.TYPE_NAMES)
def test_products(type_name: str) -> None:
    """Close to the reference; each row the same bits in a pass of 1, 3 and 16 rows, and in the second of two passes."""
    case = Case(type_name)
    expected = case.expected()[:32]
    whole = case.run(Share(16, 1), 32)
    np.testing.assert_allclose(whole, expected, atol=4e-6 * np.abs(expected).max(), rtol=0)
    for rows in (1, 3):
        np.testing.assert_array_equal(case.run(Share(rows, 1)), whole[:rows])


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x88])
@pytest.mark.parametrize("type_name", [t for t in samples.TYPE_NAMES if packed_format(t).format.family != "float"])
def test_extreme_integers(type_name: str, byte: int) -> None:
    """Largest codes against activations of +-127 throughout: no intermediate sum may saturate."""
    case = Case(type_name, byte)
    expected = case.expected()
    np.testing.assert_allclose(case.run(Share(2, 1)), expected[:2], atol=4e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "F16"])
def test_rows_are_independent(type_name: str) -> None:
    """Every number of rows from 1 to 16 gives the same bits."""
    case = Case(type_name)
    whole = case.run(Share(16, 1))
    for rows in range(1, 16):
        np.testing.assert_array_equal(case.run(Share(rows, 1)), whole[:rows])


@pytest.mark.parametrize("type_name", ["Q6_K", "F16"])
def test_other_numbers_of_slices(type_name: str) -> None:
    """Close to the reference, and the same bits whatever the number of rows."""
    case = Case(type_name)
    expected = case.expected()
    whole = case.run(Share(16, 1), slices=4)
    np.testing.assert_allclose(whole, expected[:16], atol=4e-6 * np.abs(expected).max(), rtol=0)
    for rows in (1, 8):
        np.testing.assert_array_equal(case.run(Share(rows, 1), slices=4), whole[:rows])


def test_bias() -> None:
    case = Case("Q4_0")
    np.testing.assert_array_equal(case.run(Share(3, 1), epilogue="store_bias"), case.run(Share(3, 1)) + case.bias)


def test_fewer_blocks_than_slices() -> None:
    case = Case("Q8_0", columns=32)
    np.testing.assert_allclose(case.run(Share(2, 1)), case.expected()[:2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("compiled", [5, 16])
def test_argmax_parts(compiled: int) -> None:
    """The best of each 32 weight rows, the lowest on ties: all rows of a zero activation tie."""
    case = Case("Q8_0")
    rows = 2 * compiled if compiled == 16 else compiled
    codes = case.inputs[0]
    codes[1] = 0
    case.inputs[2][1] = 0
    products = case.run(Share(compiled, 1), rows)
    value, index = case.best(Share(compiled, 1), rows)
    for part in range(-(-WEIGHT_ROWS // ROWS)):
        inside = products[:, part * ROWS : (part + 1) * ROWS]
        np.testing.assert_array_equal(index[part], part * ROWS + inside.argmax(axis=1))
        np.testing.assert_array_equal(value[part], inside.max(axis=1))


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "Q4_1", "F16"])
def test_shares_of_prefill(type_name: str) -> None:
    """More weight rows a thread give the same bits; of 70 rows the last workgroup's second unit is not there."""
    case = Case(type_name, weight_rows=70)
    np.testing.assert_array_equal(case.run(Share(16, 2), 32), case.run(Share(16, 1), 32))


@pytest.mark.parametrize(("type_name", "activation", "form"), [
    ("Q4_K", "silu", "q8_32s"), ("Q8_0", "gelu", "q8_32s"), ("F16", "silu", "f32"),
])
def test_gated(type_name: str, activation: str, form: str) -> None:
    """Close to the formula, and the same bits with few rows and with the shares of prefill."""
    case = GatedCase(type_name, activation, form)
    whole = case.run(Share(16, 1), 32)
    for share, rows in ((Share(3, 1), 3), (Share(16, 2), 32)):
        for many, few in zip(whole, case.run(share, rows), strict=True):
            np.testing.assert_array_equal(many[: len(few)], few)
    samples.assert_stands_for(whole, form, case.expected()[:32])


def test_every_format_is_tested() -> None:
    assert {packed_format(t).format.name for t in samples.TYPE_NAMES} == set(PACKED_FORMATS)
