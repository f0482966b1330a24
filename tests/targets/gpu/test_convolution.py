"""DFlash2's convolutions by formula, and the independence of a block's rows from how many follow."""

from __future__ import annotations

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.convolution import convolution_groups, convolution_matmul, norm_convolution
from dflashc.targets.gpu.kernels.norm import norm
from dflashc.targets.gpu.kernels.row_groups import activation_form
from dflashc.targets.gpu.kernels.shares import Share
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import pack_rows, packed_format
from tests.targets import samples
from tests.targets.cpu import test_convolution as cpu
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")
CASES = [("Q8_0", 512, 2, 16, "q8_32s"), ("F16", 288, 2, 16, "q8_32s"), ("Q8_0", 160, 3, 4, "f32"),
         ("Q4_K", 256, 1, 32, "f32"), ("Q8_0", 320, 5, 16, "q8_32s"), ("Q8_0", 320, 2, 160, "q8_32s")]
"""GGUF type of P, H, taps, group size, form of the result. Some leave the last workgroup less to do than others; five
taps need more than one pass of the matmul, groups of 160 channels more than one staging."""
FORMS = ("f32", "q8_32s")


class Case(cpu.Case):
    """A case in the forms that GPUs read."""

    def __init__(self, type_name: str, columns: int, taps: int, group_size: int, form: str) -> None:
        super().__init__(type_name, columns, taps, group_size, form, activation_form(packed_format(type_name).format))
        self.packed = pack_rows(type_name, self.blocks, columns, LANES).view(np.uint32)

    def run_first(self, rows: int, by: str = "dots") -> tuple[list[np.ndarray], np.ndarray]:
        """The buffers of the result, and the dynamic weights of side 1."""
        activation = [np.ascontiguousarray(b[:rows]) for b in self.inputs]
        outputs = samples.empty_form(self.form, rows, self.columns)
        if self.input_form != "f32":
            activation[0] = activation[0].view(np.int32)
        if self.form != "f32":
            outputs[0] = outputs[0].view(np.int32)
        kernel = convolution_matmul(TRAITS, self.layout.name, Share(rows, 1, by), self.taps, self.group_size, self.form)
        units = -(-self.groups // convolution_groups(self.taps, self.group_size, self.form))
        *_, dynamic = ran = run_kernel(kernel, [
            *activation, self.u[:rows], self.packed, self.base, *outputs,
            np.full((rows, self.taps, self.groups), np.nan, np.float32), self.columns], units)
        results = ran[-1 - len(outputs) : -1]
        if self.form != "f32":
            results[0] = results[0].view(np.int8)
        return results, dynamic

    def run_second(self, rows: int, dynamic: np.ndarray, forms: tuple[str, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
        """x', and the buffers of all forms."""
        buffers = [b for form in forms for b in samples.empty_form(form, rows, self.columns)]
        buffers = [b.view(np.int32) if b.dtype == np.int8 else b for b in buffers]
        ran = run_kernel(norm_convolution(TRAITS, self.taps, self.group_size, forms), [
            self.x[:rows], self.z[:rows], dynamic, self.base, np.full((rows, self.columns), np.nan, np.float32),
            *([self.weight] if forms else []), *buffers, self.columns, cpu.EPSILON], rows)
        return ran[4], [b.view(np.int8) if i == 1 else b for i, b in enumerate(ran[6:])]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_dynamic_weights_and_first_convolution(case: tuple[str, int, int, int, str]) -> None:
    """By formula; a row's bits depend on itself and the rows before it alone."""
    c = Case(*case)
    outputs, dynamic = c.run_first(16)
    both = c.dynamic()
    np.testing.assert_allclose(dynamic, both[:, 1], rtol=0, atol=4e-6 * np.abs(both).max())
    expected = c.convolved(0, c.u, both[:, 0])
    found = samples.values_of(outputs, c.form)
    step = np.abs(expected).max() / (1e5 if c.form == "f32" else 200)
    np.testing.assert_allclose(found, expected, rtol=0, atol=step)
    for rows in (1, 2, 8) if case == CASES[0] else (2,):
        fewer_outputs, fewer = c.run_first(rows)
        for few, many in zip([*fewer_outputs, fewer], [*outputs, dynamic], strict=True):
            np.testing.assert_array_equal(few, many[:rows])


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=lambda c: "-".join(map(str, c)))
def test_second_convolution(case: tuple[str, int, int, int, str]) -> None:
    """By formula; with its sum taken as given, the bits of the plain norm; fewer rows, the same bits."""
    c = Case(*case)
    dynamic = np.ascontiguousarray(c.dynamic()[:, 1], np.float32)
    total, buffers = c.run_second(16, dynamic, FORMS)
    expected = c.x + c.convolved(1, c.z, dynamic)
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    normed = expected / np.sqrt((expected**2).mean(-1, keepdims=True) + cpu.EPSILON) * c.weight
    np.testing.assert_allclose(buffers[0], normed, rtol=0, atol=2e-6 * np.abs(normed).max())
    for found, quantised in zip(buffers[1:], samples.quantise(buffers[0], FORMS[1]), strict=True):
        np.testing.assert_array_equal(found, quantised)
    plain = run_kernel(norm(TRAITS, False, False, ("f32",)),
                       [total, c.weight, np.empty_like(total), c.columns, cpu.EPSILON], 16)[-1]
    np.testing.assert_array_equal(plain, buffers[0])
    for rows in (1, 2, 8, 16):
        np.testing.assert_array_equal(c.run_second(rows, dynamic[:rows], ())[0], total[:rows])
