"""Whole artefacts for CUDA and ROCm, run by their executors and, of CUDA, the real package of bindings.

The driver is `emulated_driver.cpp`, which runs the artefacts' kernels, as written, on this processor, and ends at the
first access behind a buffer.
"""

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dflashc.compiler.build import BuildOptions, build, lower
from dflashc.targets.gpu.target import build_kernel
from dflashc.targets.registry import find_target
from tests.targets.gpu.building import require_toolchain
from tests.targets.gpu.emulation import compile_gpu, compile_kernel, link

pytestmark = pytest.mark.slow

CASES = {"cuda-sm89": ("pycode-3m-dflash2-q8_0.gguf", "libcuda.so.1", "Emulated GPU, CUDA 13.0"),
         "rocm-gfx1151": ("pycode-3m-dflash-q8_0.gguf", "libamdhip64.so.7", "Emulated GPU, HIP 7.2")}
"""By target the drafter, the driver's library, and how the device is told."""


@pytest.fixture(scope="module")
def machines(pycode_model: Path, pycode_artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By target a folder with an artefact and the libraries of a machine that runs it."""
    folders = {}
    for target, (drafter, library, _) in CASES.items():
        require_toolchain(target)
        folders[target] = folder = tmp_path_factory.mktemp(target)
        options = BuildOptions(pycode_model, target, folder / "artefact", pycode_model.with_name(drafter),
                               self_test_of=pycode_artefact)
        build(options)
        with closing(lower(replace(options, output=folder / "again"))) as lowered:
            called = {x.kernel for program in lowered.plan.programs.values() for x in program.launches}
            for name in called:
                traits = find_target(target).traits
                compile_kernel(traits, build_kernel(traits, lowered.requests[name]), folder / f"{name}.so")
        compile_gpu(folder / "emulated_gpu.so")
        link(folder / library, Path(__file__).with_name("emulated_driver.cpp"))
    return folders


VERIFY = ("-c", "import sys; from dflashc.compiler.cli import main; sys.exit(main(['verify', sys.argv[1]]))")
EVERY_PROGRAM = ("-m", "tests.runtime.device.every_program")


def start(program: tuple[str, str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *program, str(folder / "artefact")], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[3],
                            env=os.environ | {"LD_LIBRARY_PATH": str(folder)})


def test_every_width_and_cut_on_both(machines: dict[str, Path]) -> None:
    """Greedy texts alike at every draft width and however prompts are cut, and those of a CPU."""
    running = {target: start(VERIFY, folder) for target, folder in machines.items()}
    for target, process in running.items():
        said, _ = process.communicate(timeout=900)
        assert process.returncode == 0, said
        assert CASES[target][2] in said
        assert "alike at every width and cut, and as recorded on a CPU" in said


@pytest.mark.parametrize("target", CASES)
def test_every_launch_keeps_to_its_buffers(target: str, machines: dict[str, Path]) -> None:
    """See `every_program`."""
    process = start(EVERY_PROGRAM, machines[target])
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert said.endswith("programs ran\n")
