"""Well-formed files: what a writer stored is what the reader gives back."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from dflashc.compiler.gguf import BLOCK_FORMATS, DECODABLE, GgufFile, open_gguf
from dflashc.runtime.errors import GgufError
from tests.gguf.gguf_bytes import F32, I64, INT32, Q4_0, UINT32, array, entry, gguf_file, tensor, uint32
from tests.reference.shared import shared


def write_model(path: Path, endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("llama.block_count", 2)
    writer.add_uint64("big", 2**63 + 1)
    writer.add_int8("negative", -3)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("flag", True)
    writer.add_string("general.name", "small, größer")
    writer.add_array("tokens", ["a", "", "ü", "\U0001f600"])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_array("types", [1, 2, 3])
    writer.add_array("windows", [True, False, True])
    writer.add_tensor("norm", np.arange(5, dtype=np.float32))
    writer.add_tensor("linear", np.arange(12, dtype=np.float16).reshape(3, 4))
    writer.add_tensor("map", np.array([2**40, -1], np.int64))
    writer.add_tensor("experts", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    rows = gguf.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("quantised", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> GgufFile:
    return open_gguf(write_model(tmp_path / "model.gguf"))


def opened(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "bytes.gguf"
    path.write_bytes(content)
    return open_gguf(path)


def test_table_of_types_is_that_of_the_gguf_package() -> None:
    assert {(f.name, f.type_id): (f.block_size, f.block_bytes) for f in BLOCK_FORMATS.values()} == {
        (kind.name, int(kind)): sizes for kind, sizes in GGML_QUANT_SIZES.items()
    }
    assert set(BLOCK_FORMATS) >= DECODABLE


def test_metadata_values(model: GgufFile) -> None:
    values = dict(model.metadata)
    assert values["general.architecture"] == "llama"
    assert values["general.name"] == "small, größer"
    assert values["big"] == 2**63 + 1
    assert values["negative"] == -3
    assert values["llama.rope.freq_base"] == 10000.0
    assert values["flag"] is True
    assert values["tokens"] == ["a", "", "ü", "\U0001f600"]
    np.testing.assert_array_equal(values["windows"], np.array([True, False, True]), strict=True)
    np.testing.assert_array_equal(values["scores"], np.array([0.5, -1.0], np.float32), strict=True)
    assert "missing" not in model.metadata


def test_file_attributes(model: GgufFile, tmp_path: Path) -> None:
    assert model.version == 3
    assert model.paths == [tmp_path / "model.gguf"]
    assert model.size == (tmp_path / "model.gguf").stat().st_size


def test_tensor_table_is_in_file_order_and_row_major(model: GgufFile) -> None:
    assert [(t.name, t.type_name, t.shape, t.nbytes) for t in model.tensors.values()] == [
        ("norm", "F32", (5,), 20),
        ("linear", "F16", (3, 4), 24),
        ("map", "I64", (2,), 16),
        ("experts", "F32", (2, 3, 4), 96),
        ("quantised", "Q8_0", (2, 64), 136),
    ]


def test_tensor_data(model: GgufFile) -> None:
    tensors = model.tensors
    assert tensors["norm"].data().shape == (1, 20)
    assert tensors["experts"].data().shape == (6, 16)
    assert tensors["quantised"].data().shape == (2, 68)
    np.testing.assert_array_equal(tensors["quantised"].read_rows(1, 1), tensors["quantised"].data()[1:])
    np.testing.assert_array_equal(tensors["linear"].array(), np.arange(12, dtype=np.float16).reshape(3, 4))
    np.testing.assert_array_equal(tensors["map"].array(), [2**40, -1])
    np.testing.assert_array_equal(tensors["experts"].dequantise(), np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    np.testing.assert_allclose(
        tensors["quantised"].dequantise(), np.linspace(-1, 1, 128).reshape(2, 64), atol=1 / 127 / 2 + 1e-3
    )
    with pytest.raises(GgufError, match="'quantised' is Q8_0, expected one of F16"):
        tensors["quantised"].array()
    with pytest.raises(GgufError, match="'map' is I64, which cannot be decoded"):
        tensors["map"].dequantise()


def test_a_file_that_is_cut_short_while_it_is_open(tmp_path: Path) -> None:
    """What is left can be read; the metadata too, for it was read at once."""
    path = write_model(tmp_path / "model.gguf")
    with open_gguf(path) as model:
        size = path.stat().st_size
        os.truncate(path, model.tensors["quantised"].offset + 70)
        np.testing.assert_array_equal(model.tensors["linear"].array(), np.arange(12, dtype=np.float16).reshape(3, 4))
        model.tensors["quantised"].read_rows(0, 1)
        with pytest.raises(GgufError, match=rf"cut short while it was read: it ends at \d+, {size} bytes expected"):
            model.tensors["quantised"].data()
        assert model.get_strings("tokens")[3] == "\U0001f600"


def test_a_file_that_is_changed_while_it_is_open(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    with open_gguf(path) as model:
        model.check_unchanged()
        write_model(tmp_path / "other.gguf").replace(path)
        with pytest.raises(GgufError, match="was changed while it was read"):
            model.check_unchanged()
        path.unlink()
        with pytest.raises(GgufError, match="was changed while it was read"):
            model.check_unchanged()
        np.testing.assert_array_equal(model.tensors["map"].array(), [2**40, -1])


def test_getters(model: GgufFile) -> None:
    assert model.get_int("llama.block_count") == 2
    assert model.get_int("negative") == -3
    assert model.get_int("missing", None) is None
    assert model.get_float("llama.rope.freq_base") == 10000.0
    assert model.get_bool("flag") is True
    assert model.get_str("general.name") == "small, größer"
    assert model.get_str("missing", "none") == "none"
    assert model.get_ints("types") == [1, 2, 3]
    assert model.get_ints("types", length=3) == [1, 2, 3]
    assert model.get_ints("llama.block_count", length=3) == [2, 2, 2]
    assert model.get_floats("scores") == [0.5, -1.0]
    assert model.get_bools("windows") == [True, False, True]
    assert model.get_bools("missing", [False]) == [False]
    assert model.get_strings("tokens")[3] == "\U0001f600"


@pytest.mark.parametrize(
    ("getter", "key", "message"),
    [
        ("get_int", "missing", "key 'missing' (integer) is missing"),
        ("get_ints", "missing", "key 'missing' (array of integer) is missing"),
        ("get_int", "flag", "key 'flag' holds BOOL, expected integer"),
        ("get_int", "types", "key 'types' holds array of INT32, expected integer"),
        ("get_ints", "scores", "key 'scores' holds array of FLOAT32, expected array of integer"),
        ("get_ints", "big", "key 'big' holds UINT64, expected array of integer"),
        ("get_float", "big", "key 'big' holds UINT64, expected float"),
        ("get_str", "tokens", "key 'tokens' holds array of STRING, expected string"),
        ("get_strings", "types", "key 'types' holds array of INT32, expected array of string"),
        ("get_bools", "types", "key 'types' holds array of INT32, expected array of bool"),
    ],
)
def test_getters_name_the_key_and_both_types(model: GgufFile, getter: str, key: str, message: str) -> None:
    with pytest.raises(GgufError) as error:
        getattr(model, getter)(key)
    assert message in str(error.value)


def test_array_of_another_length_is_refused(model: GgufFile) -> None:
    with pytest.raises(GgufError, match="key 'types' has 3 items, expected 4"):
        model.get_ints("types", length=4)


def test_alignment_64_with_first_offset_0(tmp_path: Path) -> None:
    model = open_gguf(write_model(tmp_path / "model.gguf", alignment=64))
    assert model.tensors["norm"].offset % 64 == 0
    np.testing.assert_array_equal(model.tensors["norm"].dequantise(), np.arange(5))
    np.testing.assert_array_equal(model.tensors["map"].array(), [2**40, -1])


def test_offsets_are_taken_from_the_table(tmp_path: Path) -> None:
    """Out of order, with a gap, not padded to the alignment, and two tensors on the same bytes."""
    data = b"\xff" * 3 + np.array([1, 2], np.float32).tobytes() + b"\xff" + np.array([7]).tobytes()
    tensors = [tensor("b", [1], I64, 12), tensor("a", [2], F32, 3), tensor("tied", [1, 2], F32, 3)]
    model = opened(tmp_path, gguf_file([], tensors, data))
    np.testing.assert_array_equal(model.tensors["a"].array(), [1, 2])
    np.testing.assert_array_equal(model.tensors["b"].array(), [7])
    np.testing.assert_array_equal(model.tensors["tied"].array(), [[1], [2]])


def test_version_2_and_a_vocabulary_without_tensors(tmp_path: Path) -> None:
    model = opened(tmp_path, gguf_file([entry("n", UINT32, uint32(5))], version=2))
    assert (model.version, model.get_int("n"), model.tensors) == (2, 5, {})


def test_empty_array(tmp_path: Path) -> None:
    assert opened(tmp_path, gguf_file([array("n", INT32, 0, b"")])).get_ints("n") == []


@pytest.mark.parametrize(
    ("type_id", "family"),
    [(36, "BitNet"), (4, "Q4_2"), (90, "TurboQuant"), (153, "ik_llama.cpp"), (2**32 - 1, "no known family")],
)
def test_unknown_type_is_listed_and_refused_when_read(tmp_path: Path, type_id: int, family: str) -> None:
    model = opened(tmp_path, gguf_file([], [tensor("w", [7, 3], type_id), tensor("n", [1])], bytes(4)))
    strange = model.tensors["w"]
    assert (strange.shape, strange.type_name, strange.type_id, strange.format) == ((3, 7), "unknown", type_id, None)
    for read in (strange.data, strange.dequantise):
        with pytest.raises(GgufError, match=f"tensor 'w' has type id {type_id}, .*{family}"):
            read()
    assert model.tensors["n"].dequantise() == 0


def test_big_endian_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="big-endian"):
        open_gguf(write_model(tmp_path / "model.gguf", endianess=gguf.GGUFEndian.BIG))


def test_type_without_decoder_can_still_be_read_as_bytes(tmp_path: Path) -> None:
    iq2_xxs = BLOCK_FORMATS["IQ2_XXS"]
    model = opened(tmp_path, gguf_file([], [tensor("w", [256, 2], iq2_xxs.type_id)], bytes(2 * iq2_xxs.block_bytes)))
    assert model.tensors["w"].data().shape == (2, iq2_xxs.block_bytes)
    with pytest.raises(GgufError, match="'w' is IQ2_XXS, which cannot be decoded"):
        model.tensors["w"].dequantise()


def test_row_that_is_not_whole_blocks(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="tensor 'w' has rows of 48 elements, not a multiple of the 32 of a Q4_0 block"):
        opened(tmp_path, gguf_file([], [tensor("w", [48, 2], Q4_0)], bytes(1000)))


def test_real_files_agree_with_the_gguf_package() -> None:
    for path in sorted(shared("models").glob("*.gguf")):
        reference = gguf.GGUFReader(path)
        with open_gguf(path) as model:
            assert list(model.tensors) == [tensor.name for tensor in reference.tensors]
            assert set(model.metadata) == {key for key in reference.fields if not key.startswith("GGUF.")}
            for key, value in model.metadata.items():
                np.testing.assert_array_equal(value, reference.fields[key].contents())
            for expected in reference.tensors:
                found = model.tensors[expected.name]
                assert found.shape == tuple(int(n) for n in reversed(expected.shape))
                values = gguf.quants.dequantize(expected.data, expected.tensor_type)
                np.testing.assert_array_equal(found.dequantise(), values.reshape(found.shape))
