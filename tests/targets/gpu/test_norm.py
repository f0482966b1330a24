"""Residual adds and RMS norms on a Vulkan device, against NumPy by formula."""

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.norm import norm
from dflashc.targets.gpu.traits import Traits
from tests.reference.functions import rms_norm
from tests.targets import samples
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")
EPSILON = 1e-5


class Case:
    """16 rows of a residual stream and of what is added to it."""

    def __init__(self, columns: int) -> None:
        rng = np.random.default_rng(columns)
        self.columns = columns
        self.x, self.delta = (rng.standard_normal((16, columns)).astype(np.float32) for _ in range(2))
        self.x[3] *= 1e3
        self.delta[4] = 0
        self.weight, self.post_weight = (rng.uniform(0.5, 1.5, columns).astype(np.float32) for _ in range(2))

    def run(self, rows: slice, residual: bool, post: bool, forms: tuple[str, ...]) -> list[np.ndarray]:
        """x' where there is a residual, then the buffers of each form."""
        x, delta = self.x[rows], self.delta[rows]
        outputs = [b for form in forms for b in samples.empty_form(form, len(x), self.columns)]
        operands = [x, *([delta, np.zeros_like(x)] if residual else []), *([self.post_weight] if post else []),
                    *([self.weight] if forms else []), *outputs, self.columns, EPSILON]
        ran = run_kernel(norm(TRAITS, residual, post, forms), operands, len(x))
        return [*([ran[2]] if residual else []), *ran[len(ran) - len(outputs) :]]

    def expected(self, residual: bool, post: bool) -> np.ndarray:
        """x', float64."""
        delta = self.delta.astype(np.float64)
        return self.x + residual * (rms_norm(delta, self.post_weight, EPSILON) if post else delta)


@pytest.mark.parametrize("columns", [32, 640, 4128])
@pytest.mark.parametrize(("residual", "post", "forms"), [
    (False, False, ("f32",)), (True, False, ("q8_32s",)), (True, True, ("f32", "q8_32s")), (True, True, ()),
], ids=str)
def test_formula_and_independent_rows(columns: int, residual: bool, post: bool, forms: tuple[str, ...]) -> None:
    case = Case(columns)
    found = case.run(slice(0, 16), residual, post, forms)
    total = case.expected(residual, post)
    normed = rms_norm(total, case.weight, EPSILON)
    if residual:
        np.testing.assert_allclose(found[0], total, rtol=1e-6, atol=1e-6)
    if "f32" in forms:
        np.testing.assert_allclose(found[residual], normed, rtol=2e-6, atol=1e-6)
    if "q8_32s" in forms:
        quantised = found[-3:]
        if "f32" in forms:  # of just these floats, exactly
            for buffer, reference in zip(quantised, samples.quantise(found[1], "q8_32s"), strict=True):
                np.testing.assert_array_equal(buffer, reference)
        np.testing.assert_allclose(samples.values_of(quantised, "q8_32s"), normed, rtol=0,
                                   atol=np.abs(normed).max() / 127)
    for first, rows in ((0, 1), (3, 2), (5, 5), (8, 8)):
        alone = case.run(slice(first, first + rows), residual, post, forms)
        for part, whole in zip(alone, found, strict=True):
            np.testing.assert_array_equal(part.view(np.uint8), whole[first : first + rows].view(np.uint8))
