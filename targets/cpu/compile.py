"""From kernels to one shared library: TIR passes, LLVM objects in parallel processes, a linker.

Knows nothing of models.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflashc.runtime.errors import TargetError
from dflashc.targets.cpu.traits import LEVELS, Traits
from dflashc.targets.parallel import processors, run_parallel
from dflashc.targets.requests import KernelRequest, batches, distinct

ENTRY_POINTS = {"dflash_abi": ("version",), "dflash_run": ("pool", "table"), "dflash_work": ("pool", "worker")}
"""Functions of the executor with their parameters: pointers, but for `worker`, an int64."""


def lower(function: Any, target: Any) -> Any:
    """TIR passes for a kernel that keeps its C signature: no packed API, no argument checks, 64-bit indices.

    LowerTVMBuiltin is left out on purpose: local buffers stay on the stack, and there are no packed calls.
    """
    import tvm
    from tvm import tirx

    t = tirx.transform
    passes = [t.FlattenBuffer(), t.NarrowDataType(64), t.VectorizeLoop(True), t.StorageRewrite(), t.UnrollLoop(),
              t.StmtSimplify(), t.RemoveNoOp(), t.LowerIntrin()]
    module = tvm.IRModule({function.attrs["global_symbol"]: function})
    module = t.BindTarget(target.with_host(target))(module)
    with target:
        return tvm.ir.transform.Sequential(passes)(module)


def _executor_functions() -> dict[str, Any]:
    """The library's entry points; their code is LLVM text (`executor.ll`), which TVM imports for its callers."""
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    text = (Path(__file__).parent / "executor.ll").read_text()
    functions = {}
    for name, parameters in ENTRY_POINTS.items():
        with IRBuilder() as builder, T.prim_func():
            T.func_name(name)
            T.func_attr({"global_symbol": name, "tirx.noalias": True})
            values = [T.arg(p, T.int64() if p == "worker" else T.handle("int64")) for p in parameters]
            with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", text):
                T.evaluate(tirx.call_extern("void", f"{name}_body", *values))
        functions[name] = builder.get()
    return functions


def compile_objects(level: str, requests: Sequence[KernelRequest], directory: Path, with_executor: bool) -> list[Path]:
    """Compile kernels, one object file each, into `directory`. Runs in a worker process."""
    import tvm

    traits = LEVELS[level]
    target = tvm.target.Target(traits.llvm_target())
    functions = {r.name: r.build(traits).function for r in requests}
    if with_executor:
        functions |= _executor_functions()
    paths = []
    for name, function in functions.items():
        path = directory / f"{name}.o"
        tvm.target.codegen.build_module(lower(function, target), target).write_to_file(str(path), "o")
        paths.append(path)
    return paths


def find_linker() -> list[str]:
    """The command that links objects to a shared library. Raises `TargetError` when the machine has none."""
    for command in ("ld", "ld.lld", "ld.gold"):
        if path := shutil.which(command):
            return [path]
    for command in ("cc", "gcc", "clang"):
        if path := shutil.which(command):
            return [path]
    raise TargetError("no linker found: looked for ld, ld.lld, ld.gold, cc; install one (Debian: apt install binutils)")


def link(objects: Sequence[Path], output: Path) -> None:
    """Link `objects` to the shared library `output`."""
    listing = output.with_suffix(".objects")
    listing.write_text("\n".join(f'"{path}"' for path in objects))
    command = [*find_linker(), "-shared", "-o", str(output), f"@{listing}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    listing.unlink()
    if result.returncode != 0:
        raise TargetError(f"{command[0]} failed: {(result.stderr or result.stdout).strip().splitlines()[-1]}")


def compile_library(traits: Traits, requests: Sequence[KernelRequest], output: Path,
                    progress: Callable[[int], None] = lambda done: None, processes: int | None = None) -> None:
    """Compile every distinct kernel of `requests` and the executor, and link them to `output`.

    Parameters
    ----------
    progress : callable
        Called with the number of kernels just finished.
    processes : int, optional
        Worker processes; the number of CPUs this process may use when left out.
    """
    kernels = distinct(requests)
    find_linker()
    workers = processes or processors()
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        jobs = [(traits.name, batch, Path(folder), index == 0) for index, batch in enumerate(batches(kernels, workers))]
        objects = run_parallel(compile_objects, jobs, workers, lambda compiled: progress(len(compiled)))
        link([path for compiled in objects for path in compiled], output)
