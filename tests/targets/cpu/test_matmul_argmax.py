"""Greedy heads and the soft cap."""

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.argmax import ARGMAX_UNIT, SOFTCAP_UNIT, argmax_reduce, matmul_argmax, softcap
from dflashc.targets.packing import pack_rows, packed_format
from dflashc.targets.requests import KernelRequest
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

COLUMNS = 256
KERNELS: list[tuple[str, int | None]] = [("q8_0", 1), ("q8_0", 11), ("q8_0", None), ("q6_k", 3), ("f32", 3)]


def symbol(layout: str, rows: int | None) -> str:
    return f"matmul_argmax_{layout}_{'rows' if rows is None else rows}"


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest(symbol(*case), matmul_argmax, case) for case in KERNELS]
    requests += [KernelRequest("argmax_reduce", argmax_reduce, ()), KernelRequest("softcap", softcap, ()),
                 KernelRequest("argmax_reduce_d2t", argmax_reduce, ("d2t",))]
    return Library(request.param, requests, tmp_path_factory.mktemp("argmax"))


def best(library: Library, type_name: str, blocks: np.ndarray, inputs: list[np.ndarray],
         rows: int | None) -> np.ndarray:
    """Weight rows of the first `rows` activation rows, and that they are looked up rightly in a map."""
    packed = pack_rows(type_name, blocks, COLUMNS, library.traits.lanes)
    count = len(inputs[0]) if rows is None else rows
    units = -(-len(blocks) // ARGMAX_UNIT)
    value, index = np.empty((units, count), np.float32), np.empty((units, count), np.int32)
    ids = np.full(count, -1, np.int32)
    library.run(symbol(packed_format(type_name).format.name, rows),
                [*inputs, packed, value, index, *([count] if rows is None else []), COLUMNS, len(blocks)], units)
    library.run("argmax_reduce", [value, index, ids, units, count], count)
    d2t, tokens = np.random.default_rng(1).permutation(3 * len(blocks)).astype(np.int32), np.full(count, -1, np.int32)
    library.run("argmax_reduce_d2t", [value, index, d2t, tokens, units, count], count)
    np.testing.assert_array_equal(tokens, d2t[ids])
    return ids


@pytest.mark.parametrize("weight_rows", [5, 256, 777])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K", "F32"])
def test_equals_the_argmax_of_the_logits(library: Library, type_name: str, weight_rows: int) -> None:
    rng = np.random.default_rng(7)
    layout = packed_format(type_name).format
    blocks = samples.random_blocks(type_name, weight_rows, COLUMNS, rng)
    inputs = samples.quantise(rng.standard_normal((32, COLUMNS)).astype(np.float32), layout.form)
    logits = samples.values_of(inputs, layout.form) @ samples.dequantise(type_name, blocks).astype(np.float64).T
    for name, rows in KERNELS:
        if name == layout.name:
            expected = logits.argmax(axis=1)[: rows or 32]
            np.testing.assert_array_equal(best(library, type_name, blocks, inputs, rows), expected)


def floats(*rows: tuple[int, float], count: int = 700) -> np.ndarray:
    """A float32 weight of `count` rows that is zero but for the first element of some rows."""
    weight = np.zeros((count, COLUMNS), np.float32)
    for row, value in rows:
        weight[row, 0] = value
    return weight.view(np.uint8)


@pytest.mark.parametrize(("weight", "expected"), [
    (floats((690, 2.0), (300, 2.0), (299, 1.0)), 300),  # equal values in different units
    (floats((12, 1.0), (9, 1.0)), 9),  # in one row group or two
    (floats((44, 1.0), (28, 1.0)), 28),  # in the same lane
    (floats(), 0),
    (floats(*((row, -1.0) for row in range(37)), count=37), 0),  # padding, which would give 0, never wins
    (floats((3, np.nan), (400, 1.0)), 400),
    (floats(*((row, np.nan) for row in range(700))), 0),
    (floats(*((row, -np.inf) for row in range(700))), 0),
])
def test_ties_padding_and_nan(library: Library, weight: np.ndarray, expected: int) -> None:
    inputs = [np.zeros((3, COLUMNS), np.float32)]
    inputs[0][:, 0] = 1
    np.testing.assert_array_equal(best(library, "F32", weight, inputs, 3), [expected] * 3)


def test_softcap(library: Library) -> None:
    values = (np.random.default_rng(8).standard_normal(2 * SOFTCAP_UNIT + 13) * 40).astype(np.float32)
    output = np.empty_like(values)
    library.run("softcap", [values, output, len(values), 30.0], 3)
    np.testing.assert_allclose(output, 30 * np.tanh(values.astype(np.float64) / 30), rtol=1e-6)
