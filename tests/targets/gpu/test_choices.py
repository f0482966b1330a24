"""What tuning may choose among, in the plan of the shipped pair."""

from contextlib import closing
from pathlib import Path

import pytest

from dflashc.compiler.build import BuildOptions, lower
from dflashc.runtime.plan import Launch

SLICES = [f"{n} slices" for n in (8, 4, 16)]


def launches(target: str, model: Path, folder: Path) -> dict[str, list[tuple[int, Launch]]]:
    """By choice, the rows of the program and the launch."""
    drafter = model.with_name("pycode-3m-dflash2-q8_0.gguf")
    found: dict[str, list[tuple[int, Launch]]] = {}
    with closing(lower(BuildOptions(model, target, folder / "artefact", drafter))) as lowered:
        for program in lowered.plan.programs.values():
            for launch in program.launches:
                if launch.choice:
                    found.setdefault(launch.choice, []).append((program.rows, launch))
    return found


@pytest.mark.parametrize(("target", "units", "first"), [
    ("vulkan-gfx1151", [""], 0), ("cuda-sm75", [""], 0), ("cuda-sm89", ["", ", dot products"], 8),
    ("rocm-gfx1151", ["", ", dot products", ", matrix unit"], 12), ("rocm-gfx1201", ["", ", dot products"], 8),
])
def test_all_launches_of_a_choice_have_its_variants(target: str, units: list[str], first: int, pycode_model: Path,
                                                    tmp_path: Path) -> None:
    """`first` is the number of rows from which on steps take the matrix unit, 0 without one."""
    codes = units, first
    for choice, found in launches(target, pycode_model, tmp_path).items():
        assert {1, 8} <= {rows for rows, _ in found}
        units, first = ([""], 0) if choice.startswith("f") else codes  # floats
        for rows, launch in found:
            variants = dict(launch.variants)
            assert list(variants) == [slices + unit for slices in SLICES for unit in units]
            assert launch.kernel == variants[SLICES[0]]
            in_prefill = rows > 16 and "argmax" not in launch.kernel  # those come in passes of 16 rows
            expected = {"": bool(first) and rows >= first, ", dot products": in_prefill, ", matrix unit": rows >= 8}
            assert {name: "_matrix" in kernel for name, kernel in variants.items()} == {
                slices + unit: expected[unit] for slices in SLICES for unit in units}
