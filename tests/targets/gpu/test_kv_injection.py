"""K and V injected by one kernel, by formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.cache_layout import KEYS
from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.kv_injection import kv_injection
from dflashc.targets.gpu.kernels.row_groups import activation_form
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import packed_format
from tests.targets.cpu.test_kv_linear import (
    CAPACITY,
    COLUMNS,
    EPSILON,
    KV_HEADS,
    LAYERS,
    MATRICES,
    START,
    Case,
    Parameters,
)
from tests.targets.cpu.test_kv_linear import CASES as CPU_CASES
from tests.targets.gpu.running import run_kernel

CASES = [(*c[:-1], "f16") for c in CPU_CASES]
ALL = list(range(MATRICES))
UNTOUCHED = 0x12345678


class Injection(Case):
    """A case in the form that GPUs read."""

    def __init__(self, type_name: str, *others: Any) -> None:
        library = SimpleNamespace(traits=SimpleNamespace(lanes=LANES))
        super().__init__(library, type_name, *others, activation_form(packed_format(type_name).format))
        self.epilogue = others[-2]

    def run(self, rows: int, compiled: int, matrices: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Both caches as words, (layers, kv_heads, capacity * D / 2), after a launch with some of the matrices."""
        buffers = [b[:rows] for b in self.inputs]
        if self.form != "f32":
            buffers[0] = np.ascontiguousarray(buffers[0]).view(np.int32)
        buffers += [np.concatenate([self.packed[m] for m in matrices]).view(np.uint32)]
        buffers += [self.biases] if self.biased else []
        table = np.stack([self.cosine[:rows], self.sine[:rows]])
        keys = np.full((LAYERS, KV_HEADS, CAPACITY * self.size // 2), UNTOUCHED, np.uint32)
        first = matrices[0]
        members = 0 if matrices == ALL[first : first + len(matrices)] else sum(1 << m - first for m in matrices)
        *_, keys, values = run_kernel(
            kv_injection(Traits("vulkan", "generic"), self.layout.name, compiled, self.size, self.pairing,
                         self.epilogue),
            [*buffers, self.norms, np.array([START]), table, keys, keys.copy(), COLUMNS, KV_HEADS, len(matrices), first,
             members, CAPACITY, rows, self.pairs, EPSILON],
            rows // compiled * len(matrices) * KV_HEADS)
        return keys, values

    def unpacked(self, caches: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Both caches as float16 (layers, kv_heads, capacity, D)."""
        keys = caches[0].view(np.float16).reshape(LAYERS, KV_HEADS, CAPACITY // KEYS, self.size // 2, KEYS, 2)
        return (keys.transpose(0, 1, 2, 4, 3, 5).reshape(LAYERS, KV_HEADS, CAPACITY, self.size),
                caches[1].view(np.float16).reshape(LAYERS, KV_HEADS, CAPACITY, self.size))


@pytest.mark.parametrize("case", [*CASES, ("Q8_0", 256, "neox", 128, "store")], ids=lambda c: f"{c[0]}-d{c[1]}")
def test_by_formula(case: Parameters) -> None:
    """Two passes of 16 rows; and the same bits with fewer rows, and for launches that hold some of the matrices."""
    c = Injection(*case)
    caches = c.run(32, 16, ALL)
    untouched = np.array([UNTOUCHED], np.uint32).view(np.float16)
    for matrix in ALL:
        cache, expected = c.unpacked(caches)[matrix % 2][matrix // 2], c.expected(matrix)
        np.testing.assert_allclose(cache[:, START : START + 32], expected, rtol=2**-10,
                                   atol=1e-3 * np.abs(expected).max())
        outside = np.delete(cache, np.s_[START : START + 32], axis=1)
        assert (outside.reshape(-1, 2) == untouched).all()
    for rows, matrices in ((1, ALL[1:]), (2, [1, 2, 5]), (8, [4]))[: 3 if case == CASES[0] else 1]:
        fewer = c.unpacked(c.run(rows, rows, matrices))
        for matrix in ALL:
            found = fewer[matrix % 2][matrix // 2]
            if matrix in matrices:
                same = c.unpacked(caches)[matrix % 2][matrix // 2][:, START : START + rows]
                np.testing.assert_array_equal(found[:, START : START + rows], same)
                found = np.delete(found, np.s_[START : START + rows], axis=1)
            assert (found.reshape(-1, 2) == untouched).all()
