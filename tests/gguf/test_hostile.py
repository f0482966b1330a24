"""Damaged and hostile files: always `GgufError`, and never much memory."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflashc.compiler.gguf import open_gguf
from dflashc.runtime.errors import GgufError
from tests.gguf.gguf_bytes import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    Q4_0,
    Q8_0,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    array,
    entry,
    gguf_file,
    header,
    string,
    tensor,
    uint32,
    uint64,
)

MEMORY_LIMIT = 50 << 20
FOUR_BYTES = bytes(4)

SMALL_FILE = gguf_file(
    [
        entry("general.architecture", STRING, string("llama")),
        entry("general.alignment", UINT32, uint32(32)),
        entry("split.count", UINT32, uint32(1)),
        array("tokens", STRING, 3, string("a") + string("") + string("ü")),
        array("types", INT32, 3, uint32(1) * 3),
        entry("eps", FLOAT32, FOUR_BYTES),
        array("flags", BOOL, 2, b"\1\0"),
    ],
    [tensor("norm", [8]), tensor("w", [32, 2], Q8_0, 32), tensor("x", [32, 1, 1, 2], Q4_0, 128)],
    bytes(range(164)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


_numbers = itertools.count()


def read_everything(folder: Path, content: bytes) -> GgufError | None:
    """Open, decode and view all there is. Any exception but `GgufError` is a failure of the test."""
    path = folder / f"{next(_numbers)}.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with open_gguf(path) as model:
            dict(model.metadata)
            for item in model.tensors.values():
                item.data()
                item.dequantise()
    except GgufError as error:
        return one_line(error)
    finally:
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
        tracemalloc.stop()
        path.unlink()
    return None


def one_line(error: GgufError) -> GgufError:
    assert "\n" not in str(error)
    assert len(str(error)) < 600
    return error


def test_the_small_file_is_well_formed(folder: Path) -> None:
    assert read_everything(folder, SMALL_FILE) is None


def test_truncation_at_every_byte(folder: Path) -> None:
    for length in range(len(SMALL_FILE)):
        error = read_everything(folder, SMALL_FILE[:length])
        assert error is not None, length
        assert "truncated" in str(error) or length == 0


TENSOR = "tensor 'w'"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"GGU", "truncated"),
        (b"safetensors", "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b"tjgg" + bytes(100), "GGJT"),
        (header(0, 0, version=1), "version 1, only 2 and 3"),
        (header(0, 0, version=4), "version 4, only 2 and 3"),
        (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
        (header(2**64 - 1, 0), "the tensor count is 18446744073709551615, the limit is"),
        (header(60_000, 0), "truncated file: the tensor count 60000"),
        (header(0, 2**63), "the key count is"),
        (header(0, 60_000), "truncated file: the key count 60000"),
        (header(0, 1) + uint64(2**64 - 1) + bytes(50), "key 0 at offset 32 is 18446744073709551615 bytes long"),
        (header(0, 1) + uint64(60_000) + bytes(50), "truncated file: key 0 needs 60000 bytes"),
        (header(0, 1) + entry("k", 13, bytes(8)), "the type of key 'k' is 13"),
        (header(0, 1) + entry("k", ARRAY, uint32(99) + bytes(50)), "the element type of key 'k' is 99"),
        (header(0, 1) + entry("k", ARRAY, uint32(ARRAY) + bytes(50)), "key 'k' is an array of arrays"),
        (header(0, 1) + entry(b"\xff\xfe", UINT8, b"\1\1\1\1"), "key 0 at offset 32 is not valid UTF-8"),
        (header(0, 1) + array("k", UINT64, 2**61, bytes(64)), "the array length of key 'k' is 2305843009213693952"),
        (header(0, 1) + array("k", UINT64, 9, bytes(64)), "truncated file: the array length of key 'k' 9"),
        (header(0, 1) + array("k", STRING, 2, bytes(9)), "truncated"),
        (header(0, 1) + array("k", STRING, 2, uint64(0) + uint64(2**40)), "string 1 of the value of key 'k' is 10995"),
        (header(0, 1) + array("k", STRING, 2, uint64(5) + bytes(10)), "truncated"),
        (gguf_file([array("k", STRING, 2, string("a") + string(b"\xff"))]), "string 1 of key 'k' is not valid UTF-8"),
        (gguf_file([entry("k", UINT8, b"\1")] * 2), "key 'k' occurs twice, at offsets 24 and 38"),
        (gguf_file([], [tensor("w", [1])] * 2, FOUR_BYTES), "tensor 'w' occurs twice, at offsets 24 and 57"),
        (gguf_file([], [tensor("w" * 257, [1])], FOUR_BYTES), "the name of tensor 0 at offset 32 is 257 bytes long"),
        (gguf_file([], [tensor(b"\xff", [1])], FOUR_BYTES), "the name of tensor 0 at offset 32 is not valid UTF-8"),
        (gguf_file([], [tensor("w", [1] * 5)], FOUR_BYTES), f"{TENSOR} has 5 dimensions, expected 1 to 4"),
        (gguf_file([], [tensor("w", [])], bytes(64)), f"{TENSOR} has 0 dimensions"),
        (header(1, 0) + string("w") + uint32(2**32 - 1) + bytes(50), f"{TENSOR} has 4294967295 dimensions"),
        (gguf_file([], [tensor("w", [4, 0])], FOUR_BYTES), f"{TENSOR} has a dimension of 0: (0, 4)"),
        (gguf_file([], [tensor("w", [2**32, 2**32])], FOUR_BYTES), "needs 73786976294838206464 bytes"),
        (gguf_file([], [tensor("w", [2**62, 1])], FOUR_BYTES), "truncated file: tensor 'w'"),
        (gguf_file([], [tensor("w", [2])], FOUR_BYTES), "needs 8 bytes at offset 64, the file ends at 68"),
        (gguf_file([], [tensor("w", [1], offset=2**64 - 4)], FOUR_BYTES), "truncated file: tensor 'w'"),
        (gguf_file([], [tensor("w", [31], Q4_0)], bytes(64)), "rows of 31 elements, not a multiple of the 32"),
    ],
)
def test_each_limit_names_what_broke_it(folder: Path, content: bytes, message: str) -> None:
    error = read_everything(folder, content)
    assert error is not None
    assert message in str(error)


@pytest.mark.parametrize("value", [0, 3, 33, 2**17, 2**30, 2**31])
def test_alignment_must_be_a_bounded_power_of_two(folder: Path, value: int) -> None:
    error = read_everything(folder, gguf_file([entry("general.alignment", UINT32, uint32(value))]))
    assert f"key 'general.alignment' is {value}, expected a power of two up to 65536" in str(error)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (entry("general.alignment", UINT64, uint64(32)), "UINT64"),
        (entry("general.alignment", STRING, string("32")), "STRING"),
        (array("general.alignment", UINT32, 1, uint32(32)), "array of UINT32"),
    ],
)
def test_alignment_of_another_type(folder: Path, content: bytes, found: str) -> None:
    error = read_everything(folder, gguf_file([content]))
    assert f"key 'general.alignment' holds {found}, expected UINT32" in str(error)


def test_43_bytes_that_promise_nearly_endless_work(folder: Path) -> None:
    """An empty key, then an array of strings: each count is what a trusting loop would run to."""
    for n_keys, kind, count in itertools.product((1, 2**64 - 1), (STRING, ARRAY, UINT8), (2**32, 2**64 - 1)):
        content = (header(0, n_keys) + uint64(0) + uint32(ARRAY) + uint32(kind) + uint64(count))[:43]
        assert len(content) == 43
        assert read_everything(folder, content) is not None
    dims = header(1, 0) + string("w") + uint32(1_000_000) + bytes(6)
    assert len(dims) == 43
    assert read_everything(folder, dims) is not None


def test_names_are_escaped_and_cut_in_messages(folder: Path) -> None:
    error = read_everything(folder, gguf_file([entry("\x1b[2J\n" + "x" * 5000, 77, b"")], data=bytes(64)))
    assert r"'\x1b[2J\nxxx" in str(error)


@pytest.mark.parametrize("kind", ["missing", "pipe", "nul"])
def test_paths_that_are_no_files(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "model.gguf")
    if kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("no named pipes on this system")
        os.mkfifo(path)
    with pytest.raises(GgufError):
        open_gguf(path + "\0" * (kind == "nul"))


@settings(max_examples=150, deadline=None)
@given(tail=st.binary(max_size=200), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_random_bytes_after_a_valid_magic(folder: Path, tail: bytes, counts: tuple[int, int]) -> None:
    read_everything(folder, header(*counts) + tail)


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, len(SMALL_FILE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_mutated_bytes(folder: Path, edits: list[tuple[int, int]]) -> None:
    content = bytearray(SMALL_FILE)
    for position, value in edits:
        content[position] = value
    read_everything(folder, bytes(content))


EXTREMES = [0, 1, 2**8, 2**16, 2**22, 2**24, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, len(SMALL_FILE) - 8), value=st.sampled_from(EXTREMES))
@example(position=8, value=2**64 - 1)
@example(position=16, value=2**64 - 1)
def test_extreme_numbers_at_any_place(folder: Path, position: int, value: int) -> None:
    read_everything(folder, SMALL_FILE[:position] + uint64(value) + SMALL_FILE[position + 8 :])


@settings(max_examples=100, deadline=None)
@given(
    dims=st.lists(st.sampled_from([*EXTREMES, 32, 256]), max_size=6),
    kind=st.integers(0, 45),
    offset=st.sampled_from(EXTREMES),
)
def test_tensor_extents_lie_inside_the_file(folder: Path, dims: list[int], kind: int, offset: int) -> None:
    read_everything(folder, gguf_file([], [tensor("w", dims, kind, offset)], bytes(300)))
