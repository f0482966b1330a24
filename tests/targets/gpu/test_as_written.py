"""Kernels that no other test runs as written for CUDA and ROCm: their tests of Vulkan, on threads of this machine."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflashc.targets.gpu.builder import Kernel
from dflashc.targets.gpu.traits import Traits
from tests.targets.gpu import (
    test_accept,
    test_activation,
    test_argmax,
    test_candidates,
    test_convolution,
    test_embedding,
    test_norm,
    test_random_numbers,
    test_rejection,
    test_rope,
    test_sampler,
    test_selector,
)
from tests.targets.gpu.emulation import run_emulated

TARGETS = [Traits("cuda", "sm_89", most_threads=1024), Traits("rocm", "gfx1151", most_threads=1024)]

CASES: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (test_accept.test_longest_agreed_prefix, (16,)),
    (test_activation.test_taps_lie_side_by_side, ("q8_32s", 5)),
    (test_activation.test_gated, ("gelu", "q8_32s", 1120)),
    (test_activation.test_scale_and_softcap, ()),
    (test_argmax.test_best_of_all_parts, (2, 1000)),
    (test_candidates.test_best_of_every_segment_and_row, (16, 5)),
    (test_convolution.test_dynamic_weights_and_first_convolution, (test_convolution.CASES[0],)),
    (test_convolution.test_second_convolution, (test_convolution.CASES[0],)),
    *((test_embedding.test_values, (name,)) for name in ("Q4_K", "Q5_1", "Q6_K", "BF16")),
    (test_norm.test_formula_and_independent_rows, (640, True, True, ("f32", "q8_32s"))),
    (test_random_numbers.test_numbers_of_the_host, (next(iter(test_random_numbers.Purpose)),)),
    (test_rejection.test_broken_logits_are_marked, ()),
    (test_rope.test_accuracy, (1e4, 4095, 5, 1.25)),
    (test_sampler.test_vocabularies, (5,)),
    (test_selector.test_walk, (test_selector.TABLES[0], 8, 0.7)),
    (test_selector.test_best_candidate, (8,)),
]


@pytest.mark.parametrize("traits", TARGETS, ids=lambda t: t.code)
@pytest.mark.parametrize(("test", "arguments"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_kernel(test: Callable[..., None], arguments: tuple[Any, ...], traits: Traits,
                monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(kernel: Kernel, *others: Any) -> list[np.ndarray]:
        ran.append(kernel.name)
        return run_emulated(traits, kernel, *others)

    for module in {inspect.getmodule(test), test_candidates}:  # others find candidates by its kernels
        monkeypatch.setattr(module, "TRAITS", traits)
        monkeypatch.setattr(module, "run_kernel", run)
    test(*arguments)
    assert ran
