"""The quantiser and the elementary functions, on every feature level, against NumPy by formula."""

import numpy as np
import pytest

from dflashc.targets.cpu.builder import Kernel, KernelBuilder, bind, load, store
from dflashc.targets.cpu.kernels import vector_math
from dflashc.targets.cpu.kernels.activation import FORMS, quantise
from dflashc.targets.cpu.traits import Traits
from dflashc.targets.requests import KernelRequest
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

FUNCTIONS = {
    "exp": np.exp,
    "tanh": np.tanh,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def apply_function(traits: Traits, name: str) -> Kernel:
    """output[i] = f(input[i]); unit = one vector."""
    k = KernelBuilder(f"apply_{name}", traits)
    with k.build():
        source = k.buffer("input", "uint16" if name == "half_to_float" else "float32")
        output = k.buffer("output", "float32")
        with k.units() as unit:
            value = bind(load(source, unit * traits.lanes, traits.lanes))
            store(output, unit * traits.lanes, getattr(vector_math, name)(traits, value), traits.lanes)
    return k.kernel


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest(f"apply_{name}", apply_function, (name,)) for name in [*FUNCTIONS, "half_to_float"]]
    requests += [KernelRequest(f"quantise_{form}", quantise, (form,)) for form in FORMS]
    return Library(request.param, requests, tmp_path_factory.mktemp("activation"))


def apply(library: Library, name: str, values: np.ndarray) -> np.ndarray:
    output = np.empty(values.shape, np.float32)
    library.run(f"apply_{name}", [values, output], values.size // library.traits.lanes)
    return output


@pytest.mark.parametrize(("name", "low", "high", "tolerance"), [
    ("exp", -87, 88, 1.5e-7), ("tanh", -12, 12, 3e-7), ("silu", -80, 80, 4e-7), ("gelu", -2, 12, 1e-6),
])
def test_functions(library: Library, name: str, low: float, high: float, tolerance: float) -> None:
    values = np.linspace(low, high, 1 << 16).astype(np.float32)
    np.testing.assert_allclose(apply(library, name, values), FUNCTIONS[name](values.astype(np.float64)), rtol=tolerance,
                               atol=1e-7 if name == "gelu" else 0)


def test_exp_at_the_ends(library: Library) -> None:
    values = np.array([-np.inf, -1e30, -105, 90, 1e30, np.inf, np.nan, 0] * 2, np.float32)
    np.testing.assert_array_equal(apply(library, "exp", values), [0, 0, 0, np.inf, np.inf, np.inf, np.nan, 1] * 2)
    denormal = np.full(16, -100, np.float32)
    np.testing.assert_allclose(apply(library, "exp", denormal), np.exp(-100.0), atol=2e-45)


def test_gated_functions_far_out(library: Library) -> None:
    values = np.array([-1e30, 1e30, -200, 200] * 4, np.float32)
    for name in ("silu", "gelu"):
        np.testing.assert_array_equal(apply(library, name, values), [0, np.float32(1e30), 0, 200] * 4)


def test_every_float16(library: Library) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    found = apply(library, "half_to_float", bits)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(found[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.isnan(found[~number]).all()


@pytest.mark.parametrize("form", FORMS)
def test_quantise(library: Library, form: str) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((5, 768)) * 10.0 ** rng.integers(-4, 4, (5, 1))).astype(np.float32)
    values[1, 256:512] = 0
    values[2, :512] = np.where(np.arange(512) % 2, 0.5, 127)  # ties: 0.5 rounds to even, 0
    found = samples.empty_form(form, *values.shape)
    library.run(f"quantise_{form}", [values, *found, values.shape[1]], len(values))
    for buffer, expected in zip(found, samples.quantise(values, form), strict=True):
        np.testing.assert_array_equal(buffer, expected)


def test_vanishing_groups_are_zero(library: Library) -> None:
    values = np.full((1, 256), 1e-40, np.float32)
    codes, scale, sums = samples.empty_form("q8_256", 1, 256)
    codes[:] = 1
    library.run("quantise_q8_256", [values, codes, scale, sums, 256], 1)
    assert not codes.any()
    assert not scale.any()
    assert not sums.any()
