"""Matmuls of every packed format, on every feature level, against NumPy with the same quantised activations."""

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.matmul import matmul
from dflashc.targets.cpu.traits import LEVELS
from dflashc.targets.packing import PACKED_FORMATS, pack_rows, packed_format
from dflashc.targets.requests import KernelRequest
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

WEIGHT_ROWS, COLUMNS = 37, 512  # rows that fill no row group
LEADING, COLUMN = 50, 5
ROWS: dict[str, list[int | None]] = {name: [3, None] for name in LEVELS} | {"x86-64-v4-vnni": [1, 2, 3, 8, 16, None]}
SWEPT = ("Q4_K", "Q8_0", "F16")
"""Types whose kernels are compared at every number of rows, on the best level."""


def symbol(layout: str, rows: int | None, epilogue: str) -> str:
    return f"matmul_{layout}_{'rows' if rows is None else rows}_{epilogue}"


def requests(level: str) -> list[KernelRequest]:
    cases = {(name, rows, "store") for name in PACKED_FORMATS for rows in ROWS[level]}
    cases |= {("q4_0", 3, "store_bias"), ("f32", 3, "store_bias")}
    if level == LEVEL_NAMES[0]:
        cases |= {(name, rows, "store") for name in map(str.lower, SWEPT) for rows in range(1, 17)}
    return [KernelRequest(symbol(*case), matmul, case) for case in sorted(cases, key=str)]


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    return Library(request.param, requests(request.param), tmp_path_factory.mktemp("matmul"))


class Case:
    """A weight of a GGUF type and 32 rows of quantised activations."""

    def __init__(self, type_name: str, byte: int | None = None) -> None:
        rng = np.random.default_rng(4)
        self.type_name = type_name
        self.layout = packed_format(type_name).format
        self.blocks = samples.random_blocks(type_name, WEIGHT_ROWS, COLUMNS, rng, byte)
        values = rng.standard_normal((32, COLUMNS)).astype(np.float32)
        if byte is not None:
            values = np.sign(values[:, :1]) * np.ones_like(values)
        self.inputs = samples.quantise(values, self.layout.form)
        self.bias = rng.standard_normal(WEIGHT_ROWS).astype(np.float32)

    def expected(self) -> np.ndarray:
        weights = samples.dequantise(self.type_name, self.blocks).astype(np.float64)
        return samples.values_of(self.inputs, self.layout.form) @ weights.T

    def run(self, library: Library, rows: int | None, epilogue: str = "store") -> np.ndarray:
        """The outputs; checks that nothing around them is written."""
        lanes = library.traits.lanes
        packed = pack_rows(self.type_name, self.blocks, COLUMNS, lanes)
        output = np.full((33, LEADING), 7, np.float32)
        library.run(symbol(self.layout.name, rows, epilogue),
                    [*self.inputs, packed, *([self.bias] if epilogue == "store_bias" else []), output,
                     *([32] if rows is None else []), COLUMNS, WEIGHT_ROWS, LEADING, COLUMN],
                    -(-WEIGHT_ROWS // lanes))
        count = 32 if rows is None else rows
        found = output[:count, COLUMN : COLUMN + WEIGHT_ROWS].copy()
        output[:count, COLUMN : COLUMN + WEIGHT_ROWS] = 7
        assert (output == 7).all()
        return found


def tolerance(layout: str, level: str) -> float:
    return 4e-6 if PACKED_FORMATS[layout].family == "float" or level == "x86-64" else 1e-6


@pytest.mark.parametrize("type_name", samples.TYPE_NAMES)
def test_products(library: Library, type_name: str) -> None:
    """Close to the reference, and each row the same bits whatever the number of rows."""
    case = Case(type_name)
    expected = case.expected()
    whole = case.run(library, None)
    limit = tolerance(case.layout.name, library.traits.name) * np.abs(expected).max()
    np.testing.assert_allclose(whole, expected, atol=limit, rtol=0)
    for rows in ROWS[library.traits.name][:-1]:
        np.testing.assert_array_equal(case.run(library, rows), whole[:rows])


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x88])
@pytest.mark.parametrize("type_name", [t for t in samples.TYPE_NAMES if packed_format(t).format.form != "f32"])
def test_extreme_integers(library: Library, type_name: str, byte: int) -> None:
    """Largest codes against activations of +-127 throughout: no intermediate sum may saturate."""
    case = Case(type_name, byte)
    expected = case.expected()
    np.testing.assert_allclose(case.run(library, None), expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("type_name", ["Q4_0", "F32"])
def test_bias(library: Library, type_name: str) -> None:
    case = Case(type_name)
    np.testing.assert_array_equal(case.run(library, 3, "store_bias"), case.run(library, 3) + case.bias)


def test_rows_are_independent(library: Library) -> None:
    """Every number of rows from 1 to 16 gives the bits of the kernel for one row."""
    if library.traits.name != LEVEL_NAMES[0]:
        pytest.skip("all numbers of rows are compiled for the best level only")
    for type_name in SWEPT:
        case = Case(type_name)
        singles = case.run(library, 16)
        np.testing.assert_array_equal(case.run(library, 1), singles[:1])
        for rows in range(2, 17):
            np.testing.assert_array_equal(case.run(library, rows), singles[:rows])


_seen: dict[str, dict[str, np.ndarray]] = {}


@pytest.mark.parametrize("type_name", samples.TYPE_NAMES)
def test_levels_agree(library: Library, type_name: str) -> None:
    """Levels with FMA give the same bits: the integers are exact and the floats are added in the same order."""
    if library.traits.dot == "none":
        pytest.skip("without FMA the floats are rounded twice")
    seen = _seen.setdefault(type_name, {})
    seen[library.traits.name] = Case(type_name).run(library, None)
    for other in seen.values():
        np.testing.assert_array_equal(other, seen[library.traits.name])
