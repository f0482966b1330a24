"""Pack, then look up on a Vulkan device: the values of every GGUF type must be the gguf package's."""

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.embedding import embed, embed_groups
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import pack_rows, packed_format
from tests.targets import samples
from tests.targets.gpu.running import run_kernel

TRAITS = Traits("vulkan", "generic")
ROWS, COLUMNS = 37, 2304  # more than the 64 blocks of a workgroup


@pytest.mark.parametrize("type_name", samples.TYPE_NAMES)
def test_values(type_name: str) -> None:
    """Exact, but for the rounding of a product where a minimum is added to it."""
    rng = np.random.default_rng(2)
    layout = packed_format(type_name).format
    blocks = samples.random_blocks(type_name, ROWS, COLUMNS, rng)
    packed = pack_rows(type_name, blocks, COLUMNS, LANES).view(np.uint32)
    expected = samples.dequantise(type_name, blocks)
    ids = rng.permutation(ROWS).astype(np.int32)
    for count, scale in ((ROWS, 1.0), (1, 25.25)):
        output = np.zeros((count + 1, COLUMNS), np.float32)
        *_, found = run_kernel(embed(TRAITS, layout.name), [ids[:count], packed, output, COLUMNS, scale],
                               count * embed_groups(COLUMNS))
        tolerance = 2**-23 * np.abs(expected).max() * scale if layout.minimum else 0
        np.testing.assert_allclose(found[:count], expected[ids[:count]] * np.float32(scale), rtol=0, atol=tolerance)
        assert not found[count].any()
