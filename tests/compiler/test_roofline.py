"""Rooflines: bytes against a published file, arithmetic by hand, and the page in docs/."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflashc.compiler.roofline import Body, Matrix, Pair, Work, render
from dflashc.targets.devices import DeviceLimits

SLOW = DeviceLimits("slow", "cpu", bandwidth=100, dot_rate=1000, memory=1, launch_seconds=0.5, float_rate=100)
QWEN3_8B = Body(hidden=4096, layers=36, feed_forward=12288, query_heads=32, kv_heads=8, head_size=128)
SMALL = Body(hidden=256, layers=2, feed_forward=512, query_heads=4, kv_heads=2, head_size=64, window=16,
             windowed_layers=1, formats=("Q8_0", "Q8_0"))


def test_bytes_of_a_published_file() -> None:
    """Qwen3-8B-Q4_K_M.gguf has 5,027,783,488 bytes, 6 MB of them tokenizer and norms."""
    pair = Pair("", 151936, QWEN3_8B, QWEN3_8B, version=1, taps=1, block_size=16)
    found = sum(m.bytes for m in QWEN3_8B.matrices()) + pair.head.bytes + Matrix(151936, 4096, "Q4_K").bytes
    assert found == pytest.approx(5_027_783_488, rel=0.01)


def test_work_by_hand() -> None:
    """A layer has 256 * 256 (q), 2 * 128 * 256 (k, v), 256 * 256 (o) and 3 * 512 * 256 elements."""
    layer = (256 + 128 + 128 + 256 + 3 * 512) * 256
    assert sum(m.elements for m in SMALL.matrices()) == 2 * layer
    assert sum(m.bytes for m in SMALL.matrices()) == 2 * layer * 34 / 32
    # K and V of a token: 2 * 2 heads * 64 * 2 bytes in each layer; one layer sees 16 tokens at most
    assert SMALL.cache_bytes(10) == 512 * 20
    assert SMALL.cache_bytes(100) == 512 * 116
    pair = Pair("", 1000, SMALL, SMALL, version=1, taps=3, block_size=8)
    decode = pair.decode(3, 0)
    assert decode.operations == 3 * (2 * layer + 256_000)
    assert decode.bytes == (2 * layer + 256_000) * 34 / 32
    assert pair.inject(5).operations == 5 * (3 * 256 * 256 + 2 * 2 * 128 * 256)


@pytest.mark.parametrize(("work", "seconds"), [
    (Work(1000, 100, 1), 10), (Work(100, 5000, 1), 5), (Work(100, 100, 7), 3.5)])
def test_the_first_limit_counts(work: Work, seconds: float) -> None:
    assert work.seconds(SLOW) == seconds


def test_prefill_by_hand() -> None:
    """4 float operations for 32 products: 0.00125 s a product at 100 a second, beside or after 0.001 s at 1000."""
    assert SLOW.prefill_rate(4) == pytest.approx(1 / 0.00225)
    assert replace(SLOW, floats_beside=True).prefill_rate(4) == pytest.approx(1 / 0.00125)
    assert replace(SLOW, floats_beside=True, dot_rate=500).prefill_rate(4) == pytest.approx(500)
    fast = replace(SLOW, matrix_rate=4000)
    assert fast.prefill_rate(4) == pytest.approx(1 / 0.0015)
    pair = Pair("", 1000, SMALL, SMALL, version=1, taps=3, block_size=8)
    layer = (256 + 128 + 128 + 256 + 3 * 512) * 256
    assert pair.prefill_seconds(fast) == pytest.approx(2 * layer * (1 / 4000 + 3 / 3200))


def test_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "roofline.md"
    assert page.read_text() == render(), "run python -m dflashc.compiler.roofline > docs/roofline.md"
