"""Plans of pairs, before anything is compiled: the same from every dialect, and as few launches as promised.

Launches that wait for no other of their group run as one; what costs is the number of groups, counted here.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflashc.compiler.build import BuildOptions, Lowered, lower
from dflashc.compiler.lower.weights import place_weights, write_weights
from dflashc.recipes.drafter import DrafterShape, drafter_body, write_drafter
from dflashc.recipes.target import TargetShape, write_target
from dflashc.recipes.tensors import Formats
from dflashc.runtime.plan import Plan
from tests.compiler.pair_files import dialects, target

ROWS = (1, 2, 8, 16, 64, 256)


def stored(lowered: Lowered, path: Path) -> bytes:
    """The bytes of `weights.bin`."""
    placed = place_weights(lowered.sources.values())
    write_weights(path, lowered.sources, placed, lowered.target.pack_rows, lowered.target.row_group, lambda size: None)
    return path.read_bytes()


@pytest.mark.parametrize("version", [1, 2])
def test_every_dialect_becomes_the_same(version: int, tmp_path: Path) -> None:
    """The same plan, the same kernels, the same weights to the bit."""
    model = target().write(tmp_path / "target.gguf")
    made = []
    for name, content in dialects(version).items():
        drafter = content.write(tmp_path / f"{name}.gguf")
        with closing(lower(BuildOptions(model, "cpu", tmp_path / "none", drafter))) as lowered:
            made.append((lowered.plan, lowered.requests, stored(lowered, tmp_path / "weights.bin")))
    assert len(made) >= 5
    assert all(one == made[0] for one in made)


def test_keys_of_the_context_are_turned_by_their_own_base(tmp_path: Path) -> None:
    content = dialects(1)["D4"].with_keys({"dflash-draft.dflash.backbone_rotary_base": 1e4})
    paths = target().write(tmp_path / "target.gguf"), content.write(tmp_path / "drafter.gguf")
    with closing(lower(BuildOptions(paths[0], "cpu", tmp_path / "none", paths[1]))) as lowered:
        plan = lowered.plan
    for program, table in (("inject.8", "rope.drafter_context"), ("draft.8", "rope.drafter")):
        read = {operand.name for launch in plan.programs[program].launches for operand in launch.operands}
        assert {name for name in read if name.startswith("rope.")} == {table}


def plan_of(folder: Path, target_layers: int, drafter_layers: int, version: int, **extras: Any) -> Plan:
    model, drafter = folder / "target.gguf", folder / "drafter.gguf"
    shape = TargetShape("qwen3", target_layers, 128, 4, 2, 64, 128, 300, context_length=512)
    write_target(model, shape, Formats("Q8_0"))
    body = drafter_body(model, drafter_layers)
    write_drafter(drafter, model, DrafterShape(body, (0, 1), version=version, **extras), Formats("Q8_0"))
    with closing(lower(BuildOptions(model, "cpu", folder / "none", drafter))) as lowered:
        return lowered.plan


def groups(plan: Plan, program: str) -> int:
    """Groups of launches in a program; the last ends with the program."""
    launches = plan.programs[program].launches
    return sum(launch.barrier for launch in launches[:-1]) + 1


@pytest.mark.parametrize("extras", [{}, {"bias": True, "sinks": True, "draft_vocabulary": 50}], ids=["plain", "extras"])
@pytest.mark.parametrize("version", [1, 2])
def test_launches_per_layer(version: int, extras: dict[str, Any], tmp_path: Path) -> None:
    """Injection takes three, however many layers; a drafter's layer 8, or 10 with convolutions; a target's 8."""
    small, large = plan_of(tmp_path, 3, 1, version, **extras), plan_of(tmp_path, 5, 5, version, **extras)
    for rows in ROWS:
        assert len(large.programs[f"inject.{rows}"].launches) == len(small.programs[f"inject.{rows}"].launches) <= 3
    for rows in (2, 8, 16):
        grown = groups(large, f"draft.{rows}") - groups(small, f"draft.{rows}")
        assert grown == 4 * {1: 8, 2: 10}[version]
        assert groups(small, f"draft.{rows}") - grown / 4 <= 3
        grown = groups(large, f"decode.{rows}") - groups(small, f"decode.{rows}")
        assert grown == 2 * 8
        assert groups(small, f"decode.{rows}") - 3 * grown / 2 <= 6
        assert groups(large, f"propose.{rows - 1}") <= {1: 3, 2: 5}[version]
        assert groups(large, f"accept.{rows}") == 1


def test_a_drafter_adds_no_launch_to_the_target(tmp_path: Path) -> None:
    """But one for each layer it reads: features are written as the residual stream passes by."""
    pair = plan_of(tmp_path, 3, 1, 1)
    with closing(lower(BuildOptions(tmp_path / "target.gguf", "cpu", tmp_path / "none"))) as lowered:
        alone = lowered.plan
    for rows in ROWS:
        assert groups(pair, f"decode.{rows}") <= groups(alone, f"decode.{rows}") + 2
    assert set(alone.programs) < set(pair.programs)
    assert alone.programs["ids.8"] == pair.programs["ids.8"]
