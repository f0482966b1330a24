"""Pack, then look up: the values of every GGUF type must be the gguf package's, exactly."""

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.embedding import embed
from dflashc.targets.packing import PACKED_FORMATS, pack_rows, packed_format
from dflashc.targets.requests import KernelRequest
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

ROWS, COLUMNS = 37, 512


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest(f"embed_{name}", embed, (name,)) for name in PACKED_FORMATS]
    return Library(request.param, requests, tmp_path_factory.mktemp("embedding"))


def look_up(library: Library, type_name: str, packed: np.ndarray, ids: np.ndarray, scale: float) -> np.ndarray:
    output = np.empty((len(ids), COLUMNS), np.float32)
    kernel = f"embed_{packed_format(type_name).format.name}"
    library.run(kernel, [ids, packed, output, COLUMNS, scale], len(ids))
    return output


@pytest.mark.parametrize("type_name", samples.TYPE_NAMES)
def test_values_are_exact(library: Library, type_name: str) -> None:
    rng = np.random.default_rng(2)
    blocks = samples.random_blocks(type_name, ROWS, COLUMNS, rng)
    packed = pack_rows(type_name, blocks, COLUMNS, library.traits.lanes)
    expected = samples.dequantise(type_name, blocks)
    ids = rng.permutation(ROWS).astype(np.int32)
    np.testing.assert_array_equal(look_up(library, type_name, packed, ids, 1.0), expected[ids])
    np.testing.assert_array_equal(look_up(library, type_name, packed, ids[:3], 25.25),
                                  expected[ids[:3]] * np.float32(25.25))


def test_extreme_exponents(library: Library) -> None:
    """MXFP4's whole range of exponents, denormal results included."""
    rng = np.random.default_rng(3)
    blocks = samples.random_blocks("MXFP4", ROWS, COLUMNS, rng)
    blocks.reshape(ROWS, -1, 17)[..., 0] = rng.integers(0, 252, (ROWS, COLUMNS // 32))
    packed = pack_rows("MXFP4", blocks, COLUMNS, library.traits.lanes)
    ids = np.arange(ROWS, dtype=np.int32)
    np.testing.assert_array_equal(look_up(library, "MXFP4", packed, ids, 1.0), samples.dequantise("MXFP4", blocks))
