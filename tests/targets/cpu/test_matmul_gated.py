"""Gated units, as a matmul's epilogue and on their own, against NumPy by formula."""

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.gated import GATED_UNIT, gated, gated_matmul, gated_unit_rows
from dflashc.targets.packing import pack_rows, packed_format
from dflashc.targets.requests import KernelRequest
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

FUNCTIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}
FUSED = [("Q4_K", "silu", "q8_256"), ("Q8_0", "gelu", "q8_32"), ("F16", "silu", "f32"), ("Q5_0", "gelu", "q8_256")]
ROWS: list[int | None] = [1, 5, 16, None]
COLUMNS, OUTPUTS = 256, 512


def symbol(type_name: str, rows: int | None, activation: str, form: str) -> str:
    return f"gated_matmul_{packed_format(type_name).format.name}_{'rows' if rows is None else rows}_{activation}_{form}"


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    rows_of_level = ROWS if request.param == LEVEL_NAMES[0] else [5, None]
    requests = [KernelRequest(symbol(type_name, rows, activation, form), gated_matmul,
                              (packed_format(type_name).format.name, rows, activation, form))
                for type_name, activation, form in FUSED for rows in rows_of_level]
    requests += [KernelRequest(f"gated_{activation}_{form}", gated, (activation, form))
                 for activation, form in (("silu", "f32"), ("gelu", "q8_32"), ("silu", "q8_256"))]
    return Library(request.param, requests, tmp_path_factory.mktemp("gated"))


@pytest.mark.parametrize(("type_name", "activation", "form"), FUSED)
def test_fused(library: Library, type_name: str, activation: str, form: str) -> None:
    rng = np.random.default_rng(5)
    layout = packed_format(type_name).format
    weights = [samples.random_blocks(type_name, OUTPUTS, COLUMNS, rng) for _ in range(2)]
    inputs = samples.quantise(rng.standard_normal((32, COLUMNS)).astype(np.float32), layout.form)
    gates, ups = (samples.values_of(inputs, layout.form) @ samples.dequantise(type_name, w).astype(np.float64).T
                  for w in weights)
    packed = [pack_rows(type_name, w, COLUMNS, library.traits.lanes) for w in weights]

    def run(rows: int | None) -> list[np.ndarray]:
        outputs = samples.empty_form(form, 32, OUTPUTS)
        library.run(symbol(type_name, rows, activation, form),
                    [*inputs, *packed, *outputs, *([32] if rows is None else []), COLUMNS, OUTPUTS],
                    OUTPUTS // gated_unit_rows(form))
        return outputs

    whole = run(None)
    samples.assert_stands_for(whole, form, FUNCTIONS[activation](gates) * ups)
    for rows in (ROWS if library.traits.name == LEVEL_NAMES[0] else [5]):
        if rows is not None:
            for part, buffer in zip(run(rows), whole, strict=True):
                np.testing.assert_array_equal(part[:rows], buffer[:rows])
                assert not part[rows:].any()


@pytest.mark.parametrize(("activation", "form", "columns"), [
    ("silu", "f32", 352), ("gelu", "q8_32", 352), ("silu", "q8_256", 512),
])
def test_alone(library: Library, activation: str, form: str, columns: int) -> None:
    rng = np.random.default_rng(6)
    gate_up = rng.standard_normal((3, 2 * columns)).astype(np.float32) * 3
    outputs = samples.empty_form(form, 3, columns)
    library.run(f"gated_{activation}_{form}", [gate_up, *outputs, columns], 3 * -(-columns // GATED_UNIT))
    gates, ups = gate_up[:, :columns].astype(np.float64), gate_up[:, columns:]
    samples.assert_stands_for(outputs, form, FUNCTIONS[activation](gates) * ups)
