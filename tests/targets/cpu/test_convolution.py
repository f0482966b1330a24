"""DFlash2's convolutions by formula, and the independence of a block's rows from how many follow."""

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.convolution import convolution_matmul, convolution_unit, norm_convolution
from dflashc.targets.cpu.kernels.norm import norm
from dflashc.targets.packing import pack_rows, packed_format
from dflashc.targets.requests import KernelRequest
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

CASES = [("Q8_0", 512, 2, 16, "q8_256"), ("F16", 288, 2, 16, "q8_32"), ("Q8_0", 160, 3, 4, "f32"),
         ("Q4_K", 256, 1, 32, "f32")]
"""GGUF type of P, H, taps, group size, form of the result. H = 288 and 160 give ragged units, unaligned row groups."""
ROWS = {case: [2, 16] for case in CASES} | {CASES[0]: [2, 7, 8, 16]}
FORMS = ("f32", "q8_32")
EPSILON = 1e-6


def symbol(kernel: str, *words: object) -> str:
    return "_".join([kernel, *(str(w).lower() for w in words)])


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest("norm", norm, (True, False, FORMS))]
    for case in CASES:
        type_name, _, taps, group_size, form = case
        layout = packed_format(type_name).format.name
        requests += [KernelRequest(symbol("convolution_matmul", layout, taps, form, rows), convolution_matmul,
                                   (layout, rows, taps, group_size, form)) for rows in ROWS[case]]
        requests += [KernelRequest(symbol("norm_convolution", taps, group_size, len(forms)), norm_convolution,
                                   (taps, group_size, forms)) for forms in ((), FORMS)]
    return Library(request.param, requests, tmp_path_factory.mktemp("convolution"))


class Case:
    """A projection, base weights and the inputs of a block of 16 rows, as the format or the caller wants them."""

    def __init__(self, type_name: str, columns: int, taps: int, group_size: int, form: str,
                 input_form: str = "") -> None:
        rng = np.random.default_rng(columns)
        self.columns, self.taps, self.group_size, self.form = columns, taps, group_size, form
        self.type_name, self.layout = type_name, packed_format(type_name).format
        self.groups = columns // group_size
        self.blocks = samples.random_blocks(type_name, 2 * taps * self.groups, columns, rng)
        self.base = rng.standard_normal((2, taps, columns)).astype(np.float32)
        self.u, self.x, self.z = rng.standard_normal((3, 16, columns)).astype(np.float32)
        self.weight = rng.uniform(0.5, 1.5, columns).astype(np.float32)
        self.input_form = input_form or self.layout.form
        self.inputs = samples.quantise(self.u, self.input_form)

    def dynamic(self) -> np.ndarray:
        """P u, float64 (16, 2, taps, groups)."""
        weights = samples.dequantise(self.type_name, self.blocks).astype(np.float64)
        return (samples.values_of(self.inputs, self.input_form) @ weights.T).reshape(16, 2, self.taps, self.groups)

    def convolved(self, side: int, source: np.ndarray, dynamic: np.ndarray) -> np.ndarray:
        """The formula in float64, with dynamic weights (rows, taps, groups)."""
        weights = self.base[side] + np.repeat(dynamic.astype(np.float64), self.group_size, axis=2)
        result = np.zeros(source.shape)
        for tap in range(self.taps):
            result[tap:] += weights[tap:, tap] * source[: len(source) - tap]
        return result

    def run_matmul(self, library: Library, rows: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The buffers of the result, and the dynamic weights of side 1."""
        packed = pack_rows(self.type_name, self.blocks, self.columns, library.traits.lanes)
        outputs = samples.empty_form(self.form, rows, self.columns)
        dynamic = np.full((rows, self.taps, self.groups), np.nan, np.float32)
        units = -(-self.columns // convolution_unit(library.traits, self.group_size, self.form))
        library.run(symbol("convolution_matmul", self.layout.name, self.taps, self.form, rows),
                    [*self.inputs, self.u, packed, self.base, *outputs, dynamic, self.columns], units)
        return outputs, dynamic

    def run_norm(self, library: Library, rows: int, dynamic: np.ndarray, forms: tuple[str, ...],
                 ) -> tuple[np.ndarray, list[np.ndarray]]:
        """x', and the buffers of all forms."""
        total = np.full((rows, self.columns), np.nan, np.float32)
        buffers = [b for form in forms for b in samples.empty_form(form, rows, self.columns)]
        normed = [self.weight, np.empty_like(total), *buffers] if forms else []
        library.run(symbol("norm_convolution", self.taps, self.group_size, len(forms)),
                    [self.x, self.z, dynamic, self.base, total, *normed, self.columns, EPSILON], rows)
        return total, buffers


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_dynamic_weights_and_first_convolution(library: Library, case: tuple[str, int, int, int, str]) -> None:
    c = Case(*case)
    outputs, dynamic = c.run_matmul(library, 16)
    both = c.dynamic()
    np.testing.assert_allclose(dynamic, both[:, 1], rtol=0, atol=4e-6 * np.abs(both).max())
    expected = c.convolved(0, c.u, both[:, 0])
    found = samples.values_of(outputs, c.form)
    step = np.abs(expected).max() / (1e5 if c.form == "f32" else 200)
    np.testing.assert_allclose(found, expected, rtol=0, atol=step)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_second_convolution(library: Library, case: tuple[str, int, int, int, str]) -> None:
    """By formula; and with its sum taken as given, the bits of the plain norm."""
    c = Case(*case)
    dynamic = np.ascontiguousarray(c.dynamic()[:, 1], np.float32)
    total, buffers = c.run_norm(library, 16, dynamic, FORMS)
    expected = c.x + c.convolved(1, c.z, dynamic)
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    normed = expected / np.sqrt((expected**2).mean(-1, keepdims=True) + EPSILON) * c.weight
    np.testing.assert_allclose(buffers[0], normed, rtol=0, atol=2e-6 * np.abs(normed).max())
    for found, quantised in zip(buffers[1:], samples.quantise(buffers[0], FORMS[1]), strict=True):
        np.testing.assert_array_equal(found, quantised)
    plain = [np.empty_like(b) for b in buffers]
    library.run("norm", [total, np.zeros_like(total), np.empty_like(total), c.weight, np.empty_like(total), *plain,
                         c.columns, EPSILON], 16)
    np.testing.assert_array_equal(plain[0], buffers[0])
    np.testing.assert_array_equal(c.run_norm(library, 16, dynamic, ())[0], total)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_rows_are_independent(library: Library, case: tuple[str, int, int, int, str]) -> None:
    """A row's bits depend on itself and the rows before it alone."""
    c = Case(*case)
    outputs, dynamic = c.run_matmul(library, 16)
    total, _ = c.run_norm(library, 16, dynamic, ())
    for rows in ROWS[case][:-1]:
        fewer_outputs, fewer = c.run_matmul(library, rows)
        for found, expected in zip([*fewer_outputs, fewer], [*outputs, dynamic], strict=True):
            np.testing.assert_array_equal(found, expected[:rows])
        np.testing.assert_array_equal(c.run_norm(library, rows, fewer, ())[0], total[:rows])
