"""Taps side by side in the fusion's form."""

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.activation import FORMS
from dflashc.targets.cpu.kernels.features import features
from dflashc.targets.requests import KernelRequest
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest(f"features_{form}", features, (form,)) for form in FORMS]
    return Library(request.param, requests, tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("form", FORMS)
def test_taps_lie_side_by_side(library: Library, form: str, rows: int) -> None:
    taps, columns = 3, 512
    values = np.random.default_rng(rows).standard_normal((rows, taps, columns)).astype(np.float32)
    values[-1, 1] = 0
    found = samples.empty_form(form, rows, taps * columns)
    for tap in (2, 0, 1):
        source = np.ascontiguousarray(values[:, tap])
        library.run(f"features_{form}", [source, *found, columns, taps * columns, tap * columns], rows)
    for buffer, expected in zip(found, samples.quantise(values.reshape(rows, -1), form), strict=True):
        np.testing.assert_array_equal(buffer, expected)
