"""What a build would refuse by the headers of its files, the pair check has refused before."""

from __future__ import annotations

import ast
import importlib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashc.compiler import build
from dflashc.compiler.build import BuildOptions, lower
from dflashc.compiler.pair import check
from dflashc.recipes.drafter import DrafterShape, write_drafter
from dflashc.recipes.target import TargetShape, write_target
from dflashc.recipes.tensors import Formats
from dflashc.runtime.errors import DflashError
from tests.compiler.pair_files import HIDDEN, TAPS, Content, drafter, target

TARGET = {"layers": 6, "hidden": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "feed_forward": 96}
TOKENIZER: dict[str, Any] = {key: None for key in target().keys if key.startswith("tokenizer.")}
INTEGERS = np.ones((HIDDEN, HIDDEN), np.int64)

Pair = tuple[Content | dict[str, int], Content | dict[str, int]]
"""Target and drafter: as they are tested, or sizes that differ from those."""

BENT: Mapping[str, Pair] = {
    "a tensor of the target is missing": (target().with_tensors({"blk.5.attn_q.weight": None}), drafter()),
    "a tensor of the target has another shape": (
        target().with_tensors({"blk.5.ffn_norm.weight": np.ones(HIDDEN + 1)}), drafter()),
    "a matrix of the target has no kernel": (target().with_tensors({"blk.1.attn_q.weight": INTEGERS}), drafter()),
    "a norm of the target cannot be decoded": (
        target().with_tensors({"output_norm.weight": np.ones(HIDDEN, np.int64)}), drafter()),
    "the target has no tokenizer": (target().with_keys(TOKENIZER), drafter().with_keys(
        {**TOKENIZER, "tokenizer.ggml.mask_token_id": 3})),
    "the target's tokenizer is not supported": (target().with_keys({"tokenizer.ggml.pre": "none of these"}), drafter()),
    "columns of the target are no multiple of 32": ({"feed_forward": 40}, {}),
    "heads of the target are no multiple of 8": ({"heads": 8, "head_size": 12}, {}),
    "a matrix of the drafter has no kernel": (target(), drafter().with_tensors({"blk.1.attn_q.weight": INTEGERS})),
    "a norm of the drafter cannot be decoded": (
        target(), drafter().with_tensors({"blk.0.attn_k_norm.weight": np.ones(16, np.int64)})),
    "columns of the drafter are no multiple of 32": ({}, {"feed_forward": 40}),
    "heads of the drafter are no multiple of 16": ({}, {"head_size": 24}),
}

# Where a build refuses a file: the modules that it goes through after the check.
SITES = ("compiler/models/graph.py", "compiler/models/relax_graph.py", "compiler/drafter/graph.py",
         "compiler/lower/program.py", "compiler/lower/programs.py", "compiler/lower/weights.py",
         "targets/cpu/target.py", "targets/packing.py", "targets/cpu/rules.py", "targets/cpu/rules_drafter.py")
NOT_BY_HEADERS = {
    "relax_graph.decoder": "taps outside the target, which the check refuses as such",
    "program._parameter": "a mistake of ours", "program.lower": "a mistake of ours",
    "program._place_outputs": "a mistake of ours", "packing.pack_rows": "a mistake of ours",
    "target.make_target": "the name of the device",
}


@pytest.fixture(params=BENT)
def bent(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    return write_bent(request.param, tmp_path)


def write_bent(name: str, folder: Path) -> tuple[Path, Path]:
    first, second = BENT[name]
    paths = folder / "target.gguf", folder / "drafter.gguf"
    if isinstance(first, Content) and isinstance(second, Content):
        return first.write(paths[0]), second.write(paths[1])
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    write_target(paths[0], TargetShape("qwen3", vocabulary=300, **{**TARGET, **first}), Formats("F32"))
    body = TargetShape("qwen3", vocabulary=300, **{**TARGET, **second, "layers": 2})
    write_drafter(paths[1], paths[0], DrafterShape(body, TAPS, 8), Formats("F32"))
    return paths


def options(paths: tuple[Path, Path], target_name: str = "cpu-x86-64-v3") -> BuildOptions:
    return BuildOptions(paths[0], target_name, paths[0].parent / "out", paths[1])


def test_the_check_and_the_build_refuse_alike(bent: tuple[Path, Path]) -> None:
    with pytest.raises(DflashError) as by_check:
        check(*bent)
    with pytest.raises(DflashError) as by_build:
        lower(options(bent))
    assert (type(by_check.value), str(by_check.value)) == (type(by_build.value), str(by_build.value))
    assert "\n" not in str(by_check.value)


def test_no_refusal_of_the_build_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place where lowering refuses a file is reached by one of the bent pairs once the check looks away."""
    pair_check = importlib.import_module("dflashc.compiler.pair.check")  # the package's `check` is its function
    monkeypatch.setattr(pair_check, "check_model", lambda *_: [])
    monkeypatch.setattr(pair_check, "_check_tensors", lambda *_: None)
    reached = set()
    for number, name in enumerate(BENT):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(DflashError) as caught:
            lower(options(write_bent(name, folder)))
        *_, innermost = traceback.extract_tb(caught.value.__traceback__)
        reached.add(f"{Path(innermost.filename).stem}.{innermost.name}")
    assert set(refusals()) - reached == NOT_BY_HEADERS.keys()


def refusals() -> list[str]:
    """`module.function` of every function that raises an error of ours, innermost."""
    root, found = Path(build.__file__).parents[1], []
    for site in SITES:
        tree = ast.parse((root / site).read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                raised = [node for node in own_nodes(function) if isinstance(node, ast.Raise)]
                found += [f"{Path(site).stem}.{function.name}" for _ in raised]
    return found


def own_nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of a function without those of functions inside."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)
    return found
