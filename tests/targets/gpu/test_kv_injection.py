"""K and V injected by one kernel, by formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.kv_injection import kv_injection
from dflashc.targets.gpu.kernels.row_groups import activation_form
from dflashc.targets.gpu.kernels.shares import Share
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import packed_format
from tests.caches import GPU, by_slot, decode
from tests.targets.cpu.test_kv_linear import (
    CAPACITY,
    COLUMNS,
    EPSILON,
    KV_HEADS,
    MATRICES,
    START,
    UNTOUCHED,
    Case,
    Parameters,
)
from tests.targets.cpu.test_kv_linear import CASES as CPU_CASES
from tests.targets.gpu.emulation import run_anywhere

CASES = [c if c[1] % 64 == 0 else (*c[:-1], "f16") for c in CPU_CASES]
ALL = list(range(MATRICES))
ROUNDING = {"f16": 1e-3, "q8_0": 5e-3}  # of the largest number: half a step of 1/127, and the input's own


class Injection(Case):
    """A case in the form that GPUs read."""

    traits = Traits("vulkan", "generic")

    def __init__(self, type_name: str, *others: Any) -> None:
        library = SimpleNamespace(traits=SimpleNamespace(lanes=LANES))
        super().__init__(library, type_name, *others, activation_form(packed_format(type_name).format))
        self.epilogue = others[3]

    def run(self, rows: int, share: Share, matrices: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Both caches (layers, kv_heads, bytes) after a launch with some of the matrices."""
        buffers = [b[:rows] for b in self.inputs]
        if self.form != "f32":
            buffers[0] = np.ascontiguousarray(buffers[0]).view(np.int32)
        buffers += [np.concatenate([self.packed[m] for m in matrices]).view(np.uint32)]
        buffers += [self.biases] if self.biased else []
        table = np.stack([self.cosine[:rows], self.sine[:rows]])
        first = matrices[0]
        members = 0 if matrices == ALL[first : first + len(matrices)] else sum(1 << m - first for m in matrices)
        *_, keys, values = run_anywhere(
            self.traits,
            kv_injection(self.traits, self.layout.name, share, self.size, self.pairing, self.epilogue, self.kv),
            [*buffers, self.norms, np.array([START]), table, *(cache.view(np.uint32) for cache in self.caches()),
             COLUMNS, KV_HEADS, first, members, CAPACITY, rows, self.pairs, EPSILON],
            rows // share.rows * len(matrices) * KV_HEADS)
        return keys.view(np.uint8), values.view(np.uint8)

    def stored(self, caches: tuple[np.ndarray, np.ndarray], matrix: int) -> np.ndarray:
        return by_slot(caches[matrix % 2][matrix // 2], self.kv, "kv"[matrix % 2], self.size, GPU)


@pytest.mark.parametrize("case", [*CASES, ("Q8_0", 256, "neox", 128, "store", "f16")],
                         ids=lambda c: f"{c[0]}-d{c[1]}-{c[-1]}")
def test_by_formula(case: Parameters) -> None:
    """Two passes of 16 rows; and the same bits with fewer rows, and for launches that hold some of the matrices."""
    c = Injection(*case)
    caches = c.run(32, Share(16, 1), ALL)
    for matrix in ALL:
        stored, expected = c.stored(caches, matrix), c.expected(matrix)
        values = decode(stored[:, START : START + 32], c.kv, "kv"[matrix % 2], GPU)
        np.testing.assert_allclose(values, expected, rtol=2**-10, atol=ROUNDING[c.kv] * np.abs(expected).max())
        assert (np.delete(stored, np.s_[START : START + 32], axis=1) == UNTOUCHED).all()
    for rows, matrices in ((1, ALL[1:]), (2, [1, 2, 5]), (8, [4]))[: 3 if case in CASES[:2] else 1]:
        fewer = c.run(rows, Share(rows, 1), matrices)
        for matrix in ALL:
            found = c.stored(fewer, matrix)
            if matrix in matrices:
                same = c.stored(caches, matrix)[:, START : START + rows]
                np.testing.assert_array_equal(found[:, START : START + rows], same)
                found = np.delete(found, np.s_[START : START + rows], axis=1)
            assert (found == UNTOUCHED).all()


@pytest.mark.parametrize("case", CASES[:2], ids=lambda c: f"{c[0]}-d{c[1]}-{c[-1]}")
@pytest.mark.parametrize(("code", "arch"), [("cuda", "sm_89"), ("rocm", "gfx1151")])
def test_what_is_written_for_cuda_and_rocm(case: Parameters, code: str, arch: str) -> None:
    c = Injection(*case)
    c.traits = Traits(code, arch)
    caches = c.run(2, Share(2, 1), ALL)
    for matrix in ALL:
        stored, expected = c.stored(caches, matrix), c.expected(matrix)[:, :2]
        values = decode(stored[:, START : START + 2], c.kv, "kv"[matrix % 2], GPU)
        np.testing.assert_allclose(values, expected, rtol=2**-10, atol=ROUNDING[c.kv] * np.abs(expected).max())
        assert (np.delete(stored, np.s_[START : START + 2], axis=1) == UNTOUCHED).all()
