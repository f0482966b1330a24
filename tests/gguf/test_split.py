"""Models in several files: any shard or the folder opens the set, and a wrong set is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflashc.compiler.gguf import open_gguf
from dflashc.runtime.errors import GgufError
from tests.gguf.gguf_bytes import INT32, STRING, UINT16, entry, gguf_file, string, tensor, uint32

NAMES = [f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of two tensors each, by the writer of the gguf package."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_uint32("llama.block_count", 6)
    for number in range(6):
        writer.add_tensor(f"w{number}", np.full((2, 3), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path


def shard(number: int, count: int, total: int, name: str) -> bytes:
    """A shard with one tensor of one element."""
    keys = [
        entry("split.no", UINT16, number.to_bytes(2, "little")),
        entry("split.count", UINT16, count.to_bytes(2, "little")),
        entry("split.tensors.count", INT32, uint32(total)),
    ]
    return gguf_file(keys, [tensor(name, [1])], bytes(4))


@pytest.mark.parametrize("name", [*NAMES, "."])
def test_any_shard_or_the_folder_opens_the_set(folder: Path, name: str) -> None:
    with open_gguf(folder / name) as model:
        assert model.paths == [folder / shard_name for shard_name in NAMES]
        assert model.size == sum(path.stat().st_size for path in model.paths)
        assert model.get_int("llama.block_count") == 6
        assert list(model.tensors) == [f"w{number}" for number in range(6)]
        for number, item in enumerate(model.tensors.values()):
            assert item.path == folder / NAMES[number // 2]
            np.testing.assert_array_equal(item.dequantise(), np.full((2, 3), number))


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_shard_is_named(folder: Path, missing: int) -> None:
    (folder / NAMES[missing]).unlink()
    with pytest.raises(GgufError, match=f"shard {NAMES[missing]} is missing; the model has 3 files"):
        open_gguf(folder)


def test_several_missing_shards(folder: Path) -> None:
    (folder / NAMES[0]).unlink()
    (folder / NAMES[2]).unlink()
    with pytest.raises(GgufError, match=f"shard {NAMES[0]} and 1 more is missing"):
        open_gguf(folder / NAMES[1])


def test_renamed_shard_is_told_its_name(folder: Path) -> None:
    (folder / NAMES[1]).rename(folder / "part.gguf")
    with pytest.raises(GgufError, match=r"is part 2 of 3 and must be named …-00002-of-00003\.gguf"):
        open_gguf(folder / "part.gguf")


def test_shard_in_the_place_of_another(folder: Path) -> None:
    shutil.copy(folder / NAMES[0], folder / NAMES[1])
    with pytest.raises(GgufError, match=r"00002-of-00003\.gguf: key 'split.no' is 0, expected 1"):
        open_gguf(folder / NAMES[0])


def test_file_that_is_no_shard_in_the_place_of_one(folder: Path) -> None:
    (folder / NAMES[1]).write_bytes(gguf_file())
    with pytest.raises(GgufError, match=r"00002-of-00003\.gguf: key 'split\.no' \(integer\) is missing"):
        open_gguf(folder / NAMES[0])


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(shard(number, 2, 2, "w"))
    with pytest.raises(GgufError, match=r"m-00002-of-00002.gguf: tensor 'w' is also in m-00001-of-00002.gguf"):
        open_gguf(tmp_path)


def test_tensor_total_of_another_model(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(shard(number, 2, 7, f"w{number}"))
    with pytest.raises(GgufError, match="the shards hold 2 tensors, expected 7"):
        open_gguf(tmp_path)


def test_shard_count_out_of_bounds(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([entry("split.count", INT32, uint32(2**31 - 1))]))
    with pytest.raises(GgufError, match=r"key 'split\.count' is 2147483647, the limit is 99999"):
        open_gguf(path)


def test_shard_count_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([entry("split.count", STRING, string("2"))]))
    with pytest.raises(GgufError, match=r"key 'split\.count' holds STRING, expected integer"):
        open_gguf(path)


def test_folder_without_a_model_or_with_two(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"no \.gguf file in this folder"):
        open_gguf(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(gguf_file())
    with pytest.raises(GgufError, match=r"2 models in this folder; name one of a\.gguf, b\.gguf"):
        open_gguf(tmp_path)
