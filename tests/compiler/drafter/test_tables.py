"""Tables of a drafter that are padded to another size than the target's vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflashc.compiler.drafter import normalise
from dflashc.compiler.drafter.tables import fit_tables
from dflashc.compiler.gguf import GgufTensor, open_gguf
from tests.compiler.drafter.test_graph import tensors
from tests.compiler.pair_files import HIDDEN, VOCABULARY, drafter

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
BOOKS = ("selector_predecessor.weight", "selector_successor.weight")


def fitted(folder: Path, rows: int, *names: str, reduced: int = 0) -> tuple[str, dict[str, GgufTensor]]:
    """Whose head is used, and the tables of a drafter whose own ones have `rows` rows."""
    shapes = dict.fromkeys(names, (rows, HIDDEN)) | dict.fromkeys(BOOKS, (rows, 32))
    if reduced:
        shapes[HEAD] = (reduced, HIDDEN)
    content = drafter(2).with_tensors(tensors(**shapes) | ({"d2t": np.arange(reduced)} if reduced else {}))
    read = normalise(open_gguf(content.write(folder / "drafter.gguf")))
    config, tables = fit_tables(read.config, read.tensors, VOCABULARY)
    assert tables.keys() - {HEAD} == read.tensors.keys() - {HEAD}
    return config.head, tables


def resized(values: np.ndarray | None, rows: int) -> np.ndarray:
    assert values is not None
    return np.pad(values[:rows], ((0, max(rows - len(values), 0)), (0, 0)))


@pytest.mark.parametrize("rows", [VOCABULARY - 9, VOCABULARY, VOCABULARY + 9])
def test_own_tables(rows: int, tmp_path: Path) -> None:
    """The head is cut to what both know, codebooks have a row per token of the target, the embedding one at least."""
    head, tables = fitted(tmp_path, rows, EMBEDDING, HEAD)
    written = tensors(**{EMBEDDING: (rows, HIDDEN), HEAD: (rows, HIDDEN)}, **dict.fromkeys(BOOKS, (rows, 32)))
    sizes = {EMBEDDING: max(rows, VOCABULARY), HEAD: min(rows, VOCABULARY), **dict.fromkeys(BOOKS, VOCABULARY)}
    assert head == "own"
    for name, size in sizes.items():
        np.testing.assert_array_equal(tables[name].array(), resized(written[name], size), name)


@pytest.mark.parametrize("rows", [VOCABULARY - 9, VOCABULARY + 9])
def test_a_tied_head_becomes_one_of_its_own(rows: int, tmp_path: Path) -> None:
    head, tables = fitted(tmp_path, rows, EMBEDDING)
    written = tensors(**{EMBEDDING: (rows, HIDDEN)})[EMBEDDING]
    assert head == "own"
    np.testing.assert_array_equal(tables[HEAD].array(), resized(written, min(rows, VOCABULARY)))
    np.testing.assert_array_equal(tables[EMBEDDING].array(), resized(written, max(rows, VOCABULARY)))


def test_a_reduced_head_stays(tmp_path: Path) -> None:
    _, tables = fitted(tmp_path, VOCABULARY + 9, reduced=40)
    assert (tables[HEAD].shape, tables[BOOKS[0]].shape) == ((40, HIDDEN), (VOCABULARY, 32))


def test_a_tied_head_of_the_targets_size_stays_tied(tmp_path: Path) -> None:
    head, tables = fitted(tmp_path, VOCABULARY, EMBEDDING)
    assert (head, HEAD in tables) == ("tied", False)


def test_pieces_across_the_end_of_what_is_stored(tmp_path: Path) -> None:
    tensor = fitted(tmp_path, VOCABULARY - 9, EMBEDDING)[1][EMBEDDING]
    whole = tensor.data()
    for first, count in ((280, 20), (291, 9), (295, 5), (0, 291)):
        np.testing.assert_array_equal(tensor.read_rows(first, count), whole[first : first + count])
    assert not whole[VOCABULARY - 9 :].any()
