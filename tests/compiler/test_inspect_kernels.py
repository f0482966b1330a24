"""What `inspect --kernels` tells of the kernels of an artefact."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflashc.compiler.inspect_kernels import describe_kernels
from dflashc.runtime.artefact import Artefact
from dflashc.runtime.errors import RequestError
from dflashc.runtime.manifest import Manifest, Requirements
from dflashc.runtime.plan import Launch, Operand, Plan, Program, Units
from dflashc.targets.registry import find_target
from tests.targets.gpu import small_kernels
from tests.targets.gpu.building import require_toolchain

SCALE = Launch("scale", "scale", Units(1), 1, (Operand("buffer", "x"), Operand("i64", "", 1), Operand("buffer", "y"),
                                               Operand("f32", "", 1.0)))


def artefact_of(folder: Path, need: Requirements) -> Artefact:
    manifest = Manifest(dflashc="", target="", requirements=need, sources=(), config={}, drafter={}, kv_types={},
                        context=1, weights=(), self_test=(), notes=())
    return Artefact(folder, manifest, Plan({}, {"run.1": Program("run", 1, (SCALE, SCALE))}, 1))


@pytest.mark.parametrize("target", ["cuda-sm89", "rocm-gfx1100", "vulkan"])
def test_what_kernels_take(target: str, tmp_path: Path) -> None:
    require_toolchain(target)
    need = find_target(target).compile(small_kernels.REQUESTS, tmp_path, lambda done: None)
    rows = {k["name"]: k for k in describe_kernels(artefact_of(tmp_path, need))}
    assert set(rows) == {b.__name__ for b in small_kernels.ALL}
    assert (rows["scale"]["launches"], rows["floats"]["launches"]) == (2, 0)
    assert (rows["block_sum"]["threads"], rows["block_sum"]["shared"]) == (64, 256)
    if target == "vulkan":
        assert all(k["registers"] is None and k["bytes"] > 0 for k in rows.values())
    else:
        assert all(0 < k["registers"] < 64 and k["spilled"] == 0 for k in rows.values())
        assert rows["floats"]["registers"] > rows["scale"]["registers"]


def test_kernels_of_a_cpu_are_refused(tmp_path: Path) -> None:
    need = replace(find_target("vulkan").requirements(), machine="x86_64")
    with pytest.raises(RequestError, match="for CPUs"):
        describe_kernels(artefact_of(tmp_path, need))
