"""The candidate selector against NumPy: lists of the best logits, and the walk over them, greedy and drawn."""

from dataclasses import dataclass

import numpy as np
import pytest

from dflashc.runtime.device_sampling import sampling_words
from dflashc.runtime.sampling import Purpose, SamplingParameters, uniform
from dflashc.targets.cpu.kernels.selector import SEGMENT, best_candidate, select_candidates, top_candidates
from dflashc.targets.packing import pack_rows, packed_format
from dflashc.targets.requests import KernelRequest
from tests.reference.functions import softmax
from tests.reference.rejection import pick
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

COUNTS = (8, 16)
TABLES = [("F16", "F16", 64), ("Q8_0", "BF16", 96), ("Q4_K", "Q6_K", 256)]
"""GGUF types of the tables of predecessors and successors, rank."""
SEED, COMMITTED = 2**63 + 5, 1000
QUANTILE_7, QUANTILE_63 = 24.32, 103.4
"""0.999 quantiles of chi-square with that many degrees of freedom. All is seeded: there is no chance in these tests."""


def symbol(count: int, tables: tuple[str, str, int]) -> str:
    return "_".join(["select", str(count), *map(str.lower, tables[:2])])


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = [KernelRequest(f"{name}_{count}", builder, (count,)) for count in COUNTS
                for name, builder in (("top", top_candidates), ("best", best_candidate))]
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


@dataclass(frozen=True)
class Walk:
    """What comes of a walk: ids, confidence (M,), and what was drawn from, candidates, probabilities (M, count)."""

    ids: np.ndarray
    confidence: np.ndarray
    candidates: np.ndarray
    probabilities: np.ndarray


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

    def run(self, library: Library, rows: int, count: int, temperature: float = 0.0) -> Walk:
        """Of the first `rows` rows, drawn at a temperature."""
        value, index = top(library, self.logits[:rows], count)
        packed = [pack_rows(name, b, self.rank, library.traits.lanes)
                  for name, b in zip(self.tables[:2], self.blocks, strict=True)]
        walk = Walk(np.full(rows, -1, np.int32), np.full(rows, np.nan, np.float32),
                    np.full((rows, count), -1, np.int32), np.full((rows, count), np.nan))
        words = sampling_words(SamplingParameters(seed=SEED), len(self.logits[0]), temperature)
        library.run(symbol(count, self.tables),
                    [value, index, self.projected, self.block, *packed, np.array([COMMITTED, 0]), words,
                     np.empty((2, self.rank), np.float32), *vars(walk).values(), rows, value.shape[1], self.rank], 1)
        return walk

    def expected(self, count: int, temperature: float = 0.0) -> Walk:
        """The walk in float64."""
        previous, steps = self.block[0], []
        for row, (logits, projected) in enumerate(zip(self.logits, self.projected, strict=True)):
            candidates = expected_top(logits, count)
            edge = self.successor[candidates] @ (self.predecessor[previous] * projected)
            scores = logits[candidates] + edge
            law = np.eye(count)[scores.argmax()]
            if temperature:
                law = softmax(scores / temperature)
            number = uniform(SEED, COMMITTED + row + 1, Purpose.DRAFT)
            previous = candidates[pick(law[None], np.array([number]))[0]]
            steps.append((previous, softmax(scores).max(), candidates, law))
        return Walk(*(np.array(column) for column in zip(*steps, strict=True)))


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


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.5])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("tables", TABLES, ids=lambda t: "-".join(map(str, t)))
def test_walk(library: Library, tables: tuple[str, str, int], count: int, temperature: float) -> None:
    """By formula; and the first rows of a block do not depend on how many follow."""
    selector = Selector(tables, 3 * SEGMENT + 5 if tables is TABLES[0] else 700)
    walk, expected = selector.run(library, 16, count, temperature), selector.expected(count, temperature)
    np.testing.assert_array_equal(walk.ids, expected.ids)
    np.testing.assert_array_equal(walk.candidates, expected.candidates)
    np.testing.assert_allclose(walk.confidence, expected.confidence, rtol=2e-5)
    np.testing.assert_allclose(walk.probabilities, expected.probabilities, rtol=1e-4)
    np.testing.assert_allclose(walk.probabilities.sum(axis=1), 1, rtol=1e-14)
    assert len(set(walk.ids) - {expected_top(row, 1)[0] for row in selector.logits}) > 0, "no edge changed a choice"
    for rows in (1, 2, 7, 8):
        fewer = selector.run(library, rows, count, temperature)
        for name, values in vars(fewer).items():
            np.testing.assert_array_equal(values, getattr(walk, name)[:rows])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_edges_the_logits_decide(library: Library, temperature: float) -> None:
    """Equal logits: the lowest id, with an even share; no number at all: id 0, which has no probability."""
    selector = Selector(TABLES[0], 200)
    selector.projected[:] = 0
    selector.logits[0] = 1
    selector.logits[1] = np.nan
    selector.logits[2, :] = -np.inf
    selector.logits[2, 33] = 5
    selector.logits[3, 7] = np.inf
    walk = selector.run(library, 16, 8, temperature)
    if not temperature:
        np.testing.assert_array_equal(walk.ids, [0, 0, 33, *selector.logits[3:].argmax(axis=1)])
    np.testing.assert_array_equal(walk.ids[1:4], [0, 33, 7])
    np.testing.assert_array_equal(walk.probabilities[1:4, 0], [1, 1, 1])
    np.testing.assert_allclose(walk.confidence[:4], [1 / 8, 0, 1, 0], rtol=1e-6)


def test_drawn_proposals_follow_their_law(library: Library) -> None:
    """100 000 rows of the same logits: single tokens, pairs of successive ones; what is drawn is what is said of it."""
    selector, law = Selector(TABLES[0], 8), softmax(np.linspace(-1, 1, 8) / 0.8)
    count = 100_000
    selector.logits = np.tile(np.linspace(-1, 1, 8).astype(np.float32), (count, 1))
    selector.projected = np.zeros((count, selector.rank), np.float32)
    walk = selector.run(library, count, 8, 0.8)
    np.testing.assert_allclose(np.take_along_axis(walk.probabilities, np.argsort(walk.candidates, axis=1), axis=1),
                               np.tile(law, (count, 1)), rtol=1e-5)
    expected = law * count
    assert ((np.bincount(walk.ids, minlength=8) - expected) ** 2 / expected).sum() < QUANTILE_7
    pairs = np.bincount(walk.ids[::2] * 8 + walk.ids[1::2], minlength=64)
    expected = np.outer(law, law).ravel() * count / 2
    assert ((pairs - expected) ** 2 / expected).sum() < QUANTILE_63


@pytest.mark.parametrize("count", COUNTS)
def test_best_candidate(library: Library, count: int) -> None:
    """Ids and shares by formula, rows on their own; ties, and rows without a number."""
    logits = np.random.default_rng(3).standard_normal((6, 2 * SEGMENT + 77)).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2], logits[3] = np.nan, -np.inf
    value, index = top(library, logits, count)
    ids, confidence = np.full(6, -1, np.int32), np.full(6, np.nan, np.float32)
    library.run(f"best_{count}", [value, index, ids, confidence, value.shape[1]], 6)
    for row in (0, 1, 4, 5):
        best = expected_top(logits[row], count)
        assert ids[row] == best[0]
        np.testing.assert_allclose(confidence[row], softmax(logits[row][best].astype(np.float64))[0], rtol=1e-5)
    assert (ids[2:4].tolist(), confidence[2:4].tolist()) == ([0, 0], [0, 0])
