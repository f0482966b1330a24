"""LLVM IR to a code object: llvmlite's AMDGPU back end, and LLD. What is missing of them. Knows nothing of kernels."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflashc.runtime.errors import TargetError
from dflashc.targets.rocm.ir import TRIPLE

CODE_OBJECT_VERSION = 5

_LINKERS = (*(f"ld.lld-{version}" for version in range(30, 15, -1)), "ld.lld")
_SECONDS = 120
_VERSION_FLAG = f"""\
target triple = "{TRIPLE}"
!llvm.module.flags = !{{!0}}
!0 = !{{i32 1, !"amdhsa_code_object_version", i32 {100 * CODE_OBJECT_VERSION}}}
"""


def missing() -> list[str]:
    """What a build for ROCm lacks on this machine, and how to get it; one line each."""
    lacking = []
    if importlib.util.find_spec("llvmlite") is None:
        lacking.append("llvmlite (pip install 'dflashc[rocm]')")
    if not _linker():
        lacking.append("ld.lld (Debian: apt install lld; or pip install ziglang, which contains it)")
    return lacking


def compile_modules(arch: str, modules: Sequence[str]) -> bytes:
    """One code object of several modules, each the text of LLVM IR. Raises `TargetError` for what is refused."""
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=arch, opt=3, reloc="pic")
    try:
        whole = llvm.parse_assembly(_VERSION_FLAG)
        for text in modules:
            whole.link_in(llvm.parse_assembly(text))
        whole.verify()
    except RuntimeError as error:
        raise TargetError(f"LLVM refused the kernels for {arch}: {' '.join(str(error).split())[:200]}") from error
    _optimise(llvm, machine, whole)
    return _link(machine.emit_object(whole))


def _optimise(llvm: Any, machine: Any, module: Any) -> None:
    """What the back end must know of a whole kernel, which hidden arguments it does without for example."""
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)


def _link(relocatable: bytes) -> bytes:
    command = _linker()
    if not command:
        raise TargetError(missing()[-1])
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "kernels.o", Path(folder) / "kernels.hsaco"
        source.write_bytes(relocatable)
        try:
            result = subprocess.run([*command, "--no-undefined", "-shared", str(source), "-o", str(output)],
                                    capture_output=True, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TargetError(f"{command[0]} did not finish in {_SECONDS} seconds") from error
        if result.returncode != 0:
            lines = (result.stderr or result.stdout).strip().splitlines() or ["no message"]
            raise TargetError(f"{Path(command[0]).name} failed: {lines[0]}")
        return output.read_bytes()


def _linker() -> list[str]:
    """The command that links, empty where there is none."""
    for name in _LINKERS:
        if path := shutil.which(name):
            return [path]
    return [sys.executable, "-m", "ziglang", "ld.lld"] if importlib.util.find_spec("ziglang") else []
