"""The candidate selector against NumPy: lists of the best logits, and the walk over them."""

import numpy as np
import pytest

from dflashc.targets.cpu.kernels.selector import SEGMENT, select_candidates, top_candidates
from dflashc.targets.packing import pack_rows, packed_format
from dflashc.targets.requests import KernelRequest
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

COUNTS = (8, 16)
TABLES = [("F16", "F16", 64), ("Q8_0", "BF16", 96), ("Q4_K", "Q6_K", 256)]
"""GGUF types of the tables of predecessors and successors, rank."""


def symbol(count: int, tables: tuple[str, str, int]) -> str:
    return "_".join(["select", str(count), *map(str.lower, tables[:2])])


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest(f"top_{count}", top_candidates, (count,)) for count in COUNTS]
    requests.append(KernelRequest("top_8_d2t", top_candidates, (8, "d2t")))
    for tables in TABLES:
        layouts = [packed_format(name).format.name for name in tables[:2]]
        requests += [KernelRequest(symbol(count, tables), select_candidates, (count, *layouts)) for count in COUNTS]
    return Library(request.param, requests, tmp_path_factory.mktemp("selector"))


def top(library: Library, logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and ids, (M, segments, count)."""
    rows, columns = logits.shape
    segments = -(-columns // SEGMENT)
    value = np.full((rows, segments, count), 77, np.float32)
    index = np.full((rows, segments, count), 77, np.int32)
    library.run(f"top_{count}", [logits, value, index, columns], rows * segments)
    return value, index


def expected_top(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of a row's `count` best logits: larger first, then the smaller id, never NaN."""
    numbers = np.flatnonzero(~np.isnan(logits))
    order = np.lexsort((numbers, -logits[numbers].astype(np.float64)))
    return numbers[order[:count]]


class Selector:
    """Tables of a selector, and the inputs of a block of 16 rows."""

    def __init__(self, tables: tuple[str, str, int], vocabulary: int, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.tables, self.rank = tables, tables[2]
        self.blocks = [samples.random_blocks(name, vocabulary, self.rank, rng) for name in tables[:2]]
        self.predecessor, self.successor = (
            samples.dequantise(name, b).astype(np.float64) for name, b in zip(tables[:2], self.blocks, strict=True))
        self.logits = rng.standard_normal((16, vocabulary)).astype(np.float32)
        edge = np.sqrt(self.rank) * self.predecessor.std() * self.successor.std()
        self.projected = (rng.standard_normal((16, self.rank)) / edge).astype(np.float32)
        self.block = np.array([vocabulary - 1, 0], np.int32)

    def run(self, library: Library, rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and probabilities of the first `rows` rows."""
        value, index = top(library, self.logits[:rows], count)
        packed = [pack_rows(name, b, self.rank, library.traits.lanes)
                  for name, b in zip(self.tables[:2], self.blocks, strict=True)]
        ids, probability = np.full(rows, -1, np.int32), np.full(rows, np.nan, np.float32)
        library.run(symbol(count, self.tables),
                    [value, index, self.projected, self.block, *packed, np.empty((2, self.rank), np.float32), ids,
                     probability, rows, value.shape[1], self.rank], 1)
        return ids, probability

    def expected(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The walk in float64."""
        previous, ids, probability = self.block[0], [], []
        for logits, projected in zip(self.logits, self.projected, strict=True):
            candidates = expected_top(logits, count)
            edge = self.successor[candidates] @ (self.predecessor[previous] * projected)
            scores = logits[candidates] + edge
            previous = candidates[scores.argmax()]
            ids.append(previous)
            probability.append(1 / np.exp(scores - scores.max()).sum())
        return np.array(ids), np.array(probability)


@pytest.mark.parametrize("columns", [5, 100, SEGMENT, 2 * SEGMENT + 77])
@pytest.mark.parametrize("count", COUNTS)
def test_top_of_every_segment(library: Library, count: int, columns: int) -> None:
    """Random logits, few distinct ones, and the order that displaces every candidate; NaN and infinities among them."""
    rng = np.random.default_rng(columns)
    logits = rng.standard_normal((5, columns)).astype(np.float32)
    logits[1] = rng.integers(0, 3, columns)
    logits[2] = np.arange(columns)
    logits[3, ::2] = np.nan
    logits[3, 1] = np.inf
    logits[4] = np.nan
    value, index = top(library, logits, count)
    for row, line in enumerate(logits):
        for segment in range(value.shape[1]):
            first = segment * SEGMENT
            best = first + expected_top(line[first : first + SEGMENT], count)
            padding = count - len(best)
            np.testing.assert_array_equal(index[row, segment], [*best, *[0] * padding])
            np.testing.assert_array_equal(value[row, segment], [*line[best], *[-np.inf] * padding])


def test_top_of_a_reduced_vocabulary(library: Library) -> None:
    logits = np.random.default_rng(3).standard_normal((3, SEGMENT + 3)).astype(np.float32)
    d2t = np.random.default_rng(4).permutation(2 * SEGMENT).astype(np.int32)
    value, index = top(library, logits, 8)
    mapped_value, mapped = np.empty_like(value), np.empty_like(index)
    library.run("top_8_d2t", [logits, d2t, mapped_value, mapped, logits.shape[1]], 3 * 2)
    np.testing.assert_array_equal(mapped_value, value)
    seen = np.isfinite(value)
    np.testing.assert_array_equal(mapped[seen], d2t[index[seen]])
    assert (mapped[~seen] == d2t[0]).all()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("tables", TABLES, ids=lambda t: "-".join(map(str, t)))
def test_walk(library: Library, tables: tuple[str, str, int], count: int) -> None:
    """By formula; and the first rows of a block do not depend on how many follow."""
    selector = Selector(tables, 3 * SEGMENT + 5 if tables is TABLES[0] else 700)
    ids, probability = selector.run(library, 16, count)
    expected_ids, expected_probability = selector.expected(count)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(probability, expected_probability, rtol=2e-5)
    assert len(set(ids) - {expected_top(row, 1)[0] for row in selector.logits}) > 0, "no edge changed a choice"
    for rows in (1, 2, 7, 8):
        fewer_ids, fewer = selector.run(library, rows, count)
        np.testing.assert_array_equal(fewer_ids, ids[:rows])
        np.testing.assert_array_equal(fewer, probability[:rows])


def test_without_edges_the_best_logit_wins(library: Library) -> None:
    """Equal logits: the lowest id, with an even share; no number at all: id 0, which has no probability."""
    selector = Selector(TABLES[0], 200)
    selector.projected[:] = 0
    selector.logits[0] = 1
    selector.logits[1] = np.nan
    selector.logits[2, :] = -np.inf
    selector.logits[2, 33] = 5
    ids, probability = selector.run(library, 16, 8)
    np.testing.assert_array_equal(ids[3:], selector.logits[3:].argmax(axis=1))
    np.testing.assert_array_equal(ids[:3], [0, 0, 33])
    np.testing.assert_allclose(probability[:3], [1 / 8, 0, 1], rtol=1e-6)
