"""K and V injected by one kernel: by formula, and the bits of a matmul followed by a cache write."""

import numpy as np
import pytest

from dflashc.runtime.kv_types import kv_bytes
from dflashc.targets.cpu.kernels.attention import kv_write
from dflashc.targets.cpu.kernels.kv_linear import kv_linear
from dflashc.targets.cpu.kernels.matmul import matmul
from dflashc.targets.packing import pack_rows, packed_format
from dflashc.targets.requests import KernelRequest
from tests.caches import by_slot, decode
from tests.targets import samples
from tests.targets.cpu.native import LEVEL_NAMES, Library, require_level

LAYERS, KV_HEADS, COLUMNS, CAPACITY, START = 3, 2, 256, 256, 37
MATRICES, TOKENS, EPSILON = 2 * LAYERS, 32, 1e-6
UNTOUCHED = 0xB5
CASES = [("Q8_0", 64, "neox", 32, "store_bias", "f16"), ("Q4_K", 128, "norm", 48, "store", "q8_0"),
         ("F16", 80, "neox", 20, "store", "f16"), ("Q8_0", 96, "neox", 48, "store_bias", "q8_0")]
"""GGUF type, head size, pairing, rotated pairs, epilogue, type of the caches."""
Parameters = tuple[str, int, str, int, str, str]
IDS = [f"{c[0]}-d{c[1]}-{c[2]}-{c[5]}" for c in CASES]
ROWS = [1, 2, 7, 8, 16, None]


def symbol(kernel: str, *words: object) -> str:
    return "_".join([kernel, *("rows" if w is None else str(w).lower() for w in words)])


@pytest.fixture(scope="module", params=LEVEL_NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    require_level(request.param)
    requests = []
    for type_name, size, pairing, _, epilogue, kv in CASES:
        layout = packed_format(type_name).format.name
        requests += [KernelRequest(symbol("kv_linear", layout, rows, size), kv_linear,
                                   (layout, rows, size, pairing, epilogue, kv)) for rows in ROWS]
        requests += [KernelRequest(symbol("matmul", layout, size), matmul, (layout, None, epilogue)),
                     KernelRequest(symbol("kv_write", size), kv_write, (size, pairing, True, kv))]
    return Library(request.param, requests, tmp_path_factory.mktemp("kv_linear"))


class Case:
    """Projections of a few layers, and features of 32 tokens, as the format or the caller wants them."""

    def __init__(self, library: Library, type_name: str, size: int, pairing: str, pairs: int, epilogue: str,
                 kv: str = "f16", form: str = "") -> None:
        rng = np.random.default_rng(size)
        self.library, self.size, self.pairing, self.pairs, self.kv = library, size, pairing, pairs, kv
        self.layout = packed_format(type_name).format
        blocks = [samples.random_blocks(type_name, KV_HEADS * size, COLUMNS, rng) for _ in range(MATRICES)]
        self.weights = [samples.dequantise(type_name, b).astype(np.float64) for b in blocks]
        self.packed = [pack_rows(type_name, b, COLUMNS, library.traits.lanes) for b in blocks]
        self.form = form or self.layout.form
        self.inputs = samples.quantise(rng.standard_normal((TOKENS, COLUMNS)).astype(np.float32), self.form)
        self.norms = rng.uniform(0.5, 1.5, (LAYERS, size)).astype(np.float32)
        self.biases = rng.standard_normal((MATRICES, KV_HEADS * size)).astype(np.float32)
        self.biased = epilogue == "store_bias"
        angle = np.outer(START + np.arange(TOKENS), 1e4 ** (-np.arange(pairs) / pairs))
        self.cosine, self.sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def caches(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V caches as the kernels see them, filled with a byte that no key or value is made of alone."""
        keys = np.full((LAYERS, KV_HEADS, CAPACITY * kv_bytes(self.kv, self.size)), UNTOUCHED, np.uint8)
        return keys, keys.copy()

    def launch(self, rows: int | None, matrices: range, caches: tuple[np.ndarray, np.ndarray]) -> None:
        weight = np.concatenate(self.packed[matrices.start : matrices.stop])
        self.library.run(
            symbol("kv_linear", self.layout.name, rows, self.size),
            [*self.inputs, weight, *([self.biases] if self.biased else []), self.norms, np.array([START]), self.cosine,
             self.sine, *caches, *([TOKENS] if rows is None else []), COLUMNS, KV_HEADS, CAPACITY, self.pairs,
             matrices.start, EPSILON],
            len(matrices) * KV_HEADS)

    def write_apart(self) -> tuple[np.ndarray, np.ndarray]:
        """The caches after `matmul` and `kv_write`, layer by layer."""
        caches = self.caches()
        width = KV_HEADS * self.size
        for layer in range(LAYERS):
            qkv = np.zeros((TOKENS, 2 * width), np.float32)
            for part in range(2):
                self.library.run(symbol("matmul", self.layout.name, self.size),
                                 [*self.inputs, self.packed[2 * layer + part],
                                  *([self.biases[2 * layer + part]] if self.biased else []), qkv, TOKENS, COLUMNS,
                                  width, 2 * width, part * width], width // self.library.traits.lanes)
            self.library.run(symbol("kv_write", self.size),
                             [np.array([START]), qkv, self.cosine, self.sine, self.norms[layer], caches[0][layer],
                              caches[1][layer], 2 * width, 0, KV_HEADS, CAPACITY, self.pairs, EPSILON],
                             KV_HEADS * TOKENS // 16)
        return caches

    def stored(self, caches: tuple[np.ndarray, np.ndarray], matrix: int) -> np.ndarray:
        """The cache of a matrix, uint8 (kv_heads, capacity, bytes)."""
        memory = caches[matrix % 2][matrix // 2]
        return by_slot(memory, self.kv, "kv"[matrix % 2], self.size, self.library.traits.lanes)

    def expected(self, matrix: int) -> np.ndarray:
        """What the matrix puts into its cache, float64 (kv_heads, tokens, D)."""
        x = samples.values_of(self.inputs, self.form) @ self.weights[matrix].T
        if self.biased:
            x = x + self.biases[matrix]
        x = x.reshape(TOKENS, KV_HEADS, self.size).swapaxes(0, 1)
        if matrix % 2:
            return x
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * self.norms[matrix // 2]
        pairs = self.pairs
        first, second = ((slice(0, pairs), slice(pairs, 2 * pairs)) if self.pairing == "neox"
                         else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)))
        result = x.copy()
        result[..., first] = x[..., first] * self.cosine - x[..., second] * self.sine
        result[..., second] = x[..., first] * self.sine + x[..., second] * self.cosine
        return result


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_by_formula(library: Library, case: Parameters) -> None:
    """Off by what the type rounds: of q8_0 half a step of 1/127 of the largest number."""
    c = Case(library, *case)
    caches = c.caches()
    c.launch(None, range(MATRICES), caches)
    for matrix in range(MATRICES):
        stored, expected = c.stored(caches, matrix), c.expected(matrix)
        values = decode(stored[:, START : START + TOKENS], c.kv, "kv"[matrix % 2], library.traits.lanes)
        np.testing.assert_allclose(values, expected, rtol=2**-10,
                                   atol={"f16": 1e-3, "q8_0": 5e-3}[c.kv] * np.abs(expected).max())
        assert (stored[:, :START] == UNTOUCHED).all()
        assert (stored[:, START + TOKENS :] == UNTOUCHED).all()


@pytest.mark.parametrize("matrices", [range(MATRICES), range(3, 5), range(1, 2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bits_of_matmul_and_cache_write(library: Library, case: Parameters, matrices: range) -> None:
    """Whatever the number of rows, and for launches that hold some of the matrices."""
    c = Case(library, *case)
    expected = c.write_apart()
    for rows in ROWS:
        caches = c.caches()
        c.launch(rows, matrices, caches)
        end = START + (rows or TOKENS)
        for matrix in range(MATRICES):
            found = c.stored(caches, matrix)
            written = found[:, START:end]
            if matrix in matrices:
                np.testing.assert_array_equal(written, c.stored(expected, matrix)[:, START:end])
            else:
                assert (written == UNTOUCHED).all()
            assert (found[:, end:] == UNTOUCHED).all()
