"""Random and rounded rows, read back by the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from dflashc.recipes.quantise import ENCODABLE, FORMATS, encode, random_rows, row_bytes
from dflashc.runtime.errors import RequestError


def decoded(rows: np.ndarray, block_format: str) -> np.ndarray:
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[block_format])


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("deviation", [1.0, 0.02])
def test_random_rows_have_the_asked_mean_and_deviation(block_format: str, deviation: float) -> None:
    rows = random_rows(np.random.default_rng(0), 64, 4096, block_format, deviation)
    values = decoded(rows, block_format)
    assert values.shape == (64, 4096)
    assert values.std() == pytest.approx(deviation, rel=0.02)
    assert abs(values.mean()) < 0.01 * deviation
    assert np.abs(values).max() < 10 * deviation


@pytest.mark.parametrize("block_format", FORMATS)
def test_deviation_zero_is_all_zero(block_format: str) -> None:
    rows = random_rows(np.random.default_rng(0), 2, 512, block_format, 0.0)
    assert not decoded(rows, block_format).any()


@pytest.mark.parametrize("block_format", FORMATS)
def test_rows_differ(block_format: str) -> None:
    values = decoded(random_rows(np.random.default_rng(0), 512, 256, block_format, 1.0), block_format)
    assert len(np.unique(values, axis=0)) == 512


@pytest.mark.parametrize("block_format", ENCODABLE)
def test_encode_rounds_given_values(block_format: str) -> None:
    values = np.random.default_rng(0).standard_normal((8, 256), np.float32)
    back = decoded(encode(values, block_format), block_format)
    step = np.abs(values).max() / {"Q4": 7, "Q5": 15, "Q8": 127}.get(block_format[:2], 250)
    assert np.abs(back - values).max() <= step


def test_refusals() -> None:
    with pytest.raises(RequestError, match="300 values are not whole blocks of 256 for Q4_K"):
        row_bytes(300, "Q4_K")
    with pytest.raises(RequestError, match="'Q9_9' cannot be generated"):
        row_bytes(256, "Q9_9")
    with pytest.raises(RequestError, match="given values cannot be stored as Q4_K"):
        encode(np.zeros((1, 256), np.float32), "Q4_K")
