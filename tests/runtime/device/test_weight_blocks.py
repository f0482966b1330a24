"""How weights are cut into blocks of memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dflashc.runtime.device.weight_blocks import Part, weight_blocks, weight_parts
from dflashc.runtime.manifest import Weight


def place(sizes: list[int]) -> list[Weight]:
    weights, offset = [], 0
    for index, size in enumerate(sizes):
        weights.append(Weight(f"w{index}", "raw", 1, size, offset, size))
        offset += -(-size // 64) * 64
    return weights


def test_a_weight_reaches_as_far_as_it_is_read() -> None:
    parts = weight_parts(place([64, 100, 64, 64]), [("w1", "w2"), ("w1", "w2", "w3"), ("w2", "w3")])
    assert [(p.name, p.offset, p.nbytes) for p in parts] == [
        ("w0", 0, 64), ("w1", 64, 256), ("w2", 192, 128), ("w3", 256, 64)]


def test_blocks_end_between_weights_and_never_within_a_run() -> None:
    blocks = list(weight_blocks(place([64] * 6), [("w1", "w2")], most=128))
    assert [[p.name for p in block.parts] for block in blocks] == [["w0"], ["w1", "w2"], ["w3", "w4"], ["w5"]]
    assert blocks[1].parts == [Part("w1", 64, 128), Part("w2", 128, 64)]


def test_a_weight_larger_than_a_block_is_alone() -> None:
    blocks = list(weight_blocks(place([64, 1000, 64]), [], most=128))
    assert [(b.offset, b.nbytes) for b in blocks] == [(0, 64), (64, 1000), (1088, 64)]


@given(st.lists(st.integers(0, 300), max_size=30), st.data())
def test_every_part_lies_in_one_block(sizes: list[int], data: st.DataObject) -> None:
    weights = place(sizes)
    starts = data.draw(st.lists(st.integers(0, max(0, len(sizes) - 2)), max_size=5)) if len(sizes) > 1 else []
    runs = [[w.name for w in weights[i : i + 1 + data.draw(st.integers(1, 3))]] for i in starts]
    blocks = list(weight_blocks(weights, runs, most=512))
    assert [p.name for b in blocks for p in b.parts] == [w.name for w in weights]
    for block in blocks:
        assert all(block.offset <= p.offset and p.offset + p.nbytes <= block.offset + block.nbytes
                   for p in block.parts)
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(blocks))
