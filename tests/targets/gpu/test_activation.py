"""Activation forms, gated units and elementary functions on a Vulkan device, against NumPy by formula."""

import numpy as np
import pytest

from dflashc.targets.gpu.builder import Kernel, KernelBuilder, bind, load, store
from dflashc.targets.gpu.kernels import elementary
from dflashc.targets.gpu.kernels.activation import quantise, spans
from dflashc.targets.gpu.kernels.elementwise import gated, scale, softcap
from dflashc.targets.gpu.traits import Traits
from tests.reference import functions
from tests.targets import samples
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")
FORMS = ["f32", "q8_32s"]


def apply_function(traits: Traits, name: str) -> Kernel:
    """output[i] = f(input[i]); workgroup = 64 elements."""
    k = KernelBuilder(f"apply_{name}", traits)
    arguments = [("input", "float32"), ("output", "float32")]
    with k.build(arguments) as (source, output), k.workgroups(64) as (group, thread):
        i = bind(group * 64 + thread)
        store(output, i, getattr(elementary, name)(bind(load(source, i))))
    return k.kernel


def apply(name: str, values: np.ndarray) -> np.ndarray:
    return run_kernel(apply_function(TRAITS, name), [values, np.zeros_like(values)], values.size // 64)[1]


@pytest.mark.parametrize(("name", "low", "high"), [("exp2", -126, 0), ("tanh", -12, 12)])
def test_functions(name: str, low: float, high: float) -> None:
    values = np.linspace(low, high, 1 << 16).astype(np.float32)
    np.testing.assert_allclose(apply(name, values), getattr(np, name)(values.astype(np.float64)), rtol=3e-7)


def test_functions_at_the_ends() -> None:
    values = np.array([0, -0.0, -1, -127, -1e4, -3e38, -np.inf, -1e-20] * 8, np.float32)
    np.testing.assert_array_equal(apply("exp2", values), [1, 1, 0.5, 0, 0, 0, 0, 1] * 8)
    values = np.array([0, 50, -50, 1e30, -1e30, 1e-30, 20, -20] * 8, np.float32)
    np.testing.assert_array_equal(apply("tanh", values), np.tanh(values.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("form", FORMS)
def test_taps_lie_side_by_side(form: str, rows: int) -> None:
    """Three taps into one matrix, each at its own columns; the last span of a row is not full."""
    taps, columns = 3, 1184
    values = np.random.default_rng(rows).standard_normal((rows, taps, columns)).astype(np.float32)
    values *= 10.0 ** np.arange(-4, 5)[np.arange(rows) % 9][:, None, None].astype(np.float32)
    values[-1, 1] = 0
    values[0, 2, :8] = [127, 0.5, 1.5, -0.5, -1.5, 126.5, -126.5, 2.5]  # ties where the scale is 1: half to even
    values[0, 2, 8:32] = 0
    values[0, 2, 32:64] = 1e-40  # too small for its inverse: zeros
    outputs = samples.empty_form(form, rows, taps * columns)
    for tap in (2, 0, 1):
        source = np.ascontiguousarray(values[:, tap])
        _, *outputs = run_kernel(quantise(TRAITS, form), [source, *outputs, columns, taps * columns, tap * columns],
                                 rows * spans(columns))
    expected = values.copy()
    if form != "f32":
        expected[0, 2, 32:64] = 0
    for found, reference in zip(outputs, samples.quantise(expected.reshape(rows, -1), form), strict=True):
        np.testing.assert_array_equal(found, reference)


@pytest.mark.parametrize(("activation", "form", "columns"), [("silu", "f32", 352), ("gelu", "q8_32s", 1120)])
def test_gated(activation: str, form: str, columns: int) -> None:
    gate_up = np.random.default_rng(6).standard_normal((5, 2 * columns)).astype(np.float32) * 3
    _, *outputs = run_kernel(gated(TRAITS, activation, form), [gate_up, *samples.empty_form(form, 5, columns), columns],
                             5 * spans(columns))
    gates, ups = gate_up[:, :columns].astype(np.float64), gate_up[:, columns:]
    function = {"silu": functions.silu, "gelu": functions.gelu_tanh}[activation]
    samples.assert_stands_for(outputs, form, function(gates) * ups)


def test_scale_and_softcap() -> None:
    values = np.linspace(-200, 200, 2500).astype(np.float32)
    padded = np.full(4096, 7, np.float32)
    for kernel, expected in ((scale(TRAITS), values * np.float32(0.3)),
                             (softcap(TRAITS), functions.softcap(values.astype(np.float64), np.float32(0.3)))):
        _, found = run_kernel(kernel, [values, padded, values.size, 0.3], spans(values.size))
        np.testing.assert_allclose(found[: values.size], expected, rtol=4e-7)
        assert (found[values.size :] == 7).all()
