"""Sizes, pieces and refusals of the packed layout; its contents are tested by the kernels that read it."""

import numpy as np
import pytest

from dflashc.runtime.errors import BuildError
from dflashc.targets.packing import PACKED_FORMATS, pack_rows, packed_format
from tests.targets import samples


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("type_name", samples.TYPE_NAMES)
def test_pieces_equal_the_whole(type_name: str, lanes: int) -> None:
    rng = np.random.default_rng(0)
    blocks = samples.random_blocks(type_name, 3 * lanes - 2, 512, rng)
    whole = pack_rows(type_name, blocks, 512, lanes)
    pieces = [pack_rows(type_name, blocks[start : start + lanes], 512, lanes) for start in range(0, len(blocks), lanes)]
    np.testing.assert_array_equal(whole, np.concatenate(pieces))
    layout = packed_format(type_name).format
    assert whole.nbytes == layout.packed_bytes(len(blocks), 512, lanes)
    assert layout.group_bytes(512, lanes) % 64 == 0


def test_quads_of_all_rows_lie_side_by_side() -> None:
    """Q8_0, spelt out: 4 codes of row 0, 4 of row 1, …, each XOR 0x80; then the float16 scales."""
    codes = np.arange(8 * 32, dtype=np.uint8).reshape(8, 32)
    scales = np.arange(1, 9, dtype=np.float16)
    blocks = np.concatenate([scales.view(np.uint8).reshape(8, 2), codes], axis=1)
    packed = pack_rows("Q8_0", blocks, 32, 8)
    quads = packed[:256].reshape(8, 8, 4)  # quad, row, code
    for quad in range(8):
        np.testing.assert_array_equal(quads[quad], codes[:, 4 * quad : 4 * quad + 4] ^ 0x80)
    np.testing.assert_array_equal(packed[256:272].view(np.float16), scales)
    assert not packed[272:].any()


def test_bytes_per_weight() -> None:
    bits = {name: 8 * f.packed_bytes(4096, 4096, 16) / 4096**2 for name, f in PACKED_FORMATS.items()}
    assert bits == {"q8_0": 8.5, "q8_0_f32": 9, "q5_0": 5.5, "q5_1": 6, "q4_0": 4.5, "q4_1": 5, "q6_k": 6.5625,
                    "q5_k": 5.625, "q4_k": 4.625, "q3_k": 3.5625, "q2_k": 2.625, "f32": 32, "f16": 16, "bf16": 16}


def test_substitutions_are_told() -> None:
    told = {name: packed_format(name).substitution for name in samples.TYPE_NAMES}
    assert {name for name, text in told.items() if text} == {"IQ4_NL", "IQ4_XS", "MXFP4"}
    assert packed_format("IQ4_NL").format.name == "q8_0"


@pytest.mark.parametrize(("type_name", "shape", "columns"), [
    ("Q8_0", (8, 34), 48), ("Q4_K", (8, 144), 128), ("Q4_K", (8, 100), 256), ("F16", (8, 62), 31), ("F32", (8, 0), 0),
])
def test_refuses_wrong_sizes(type_name: str, shape: tuple[int, int], columns: int) -> None:
    with pytest.raises(BuildError, match=r"multiple of|expected for"):
        pack_rows(type_name, np.zeros(shape, np.uint8), columns, 8)


def test_refuses_unknown_types() -> None:
    with pytest.raises(BuildError, match="IQ1_S"):
        packed_format("IQ1_S")
