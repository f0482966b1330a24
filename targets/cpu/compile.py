"""From kernels to one shared library: TIR passes, LLVM objects in parallel processes, a linker.

Kernels travel to the worker processes as (builder, arguments), since TIR cannot be serialised in this TVM; a builder is
a module-level function that returns a `Kernel`. Knows nothing of models.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashc.runtime.errors import TargetError
from dflashc.targets.cpu.traits import LEVELS, Traits

ENTRY_POINTS = {"dflash_abi": ("version",), "dflash_run": ("pool", "table"), "dflash_work": ("pool", "worker")}
"""Functions of the executor with their parameters: pointers, but for `worker`, an int64."""


@dataclass(frozen=True)
class KernelRequest:
    """One kernel to compile: `builder(traits, *arguments)` returns a `Kernel`, which gets the symbol `name`.

    `operands`, where given, are the kinds of the entries that its launches pass ("buffer", "i64", "f32"), which must be
    those that the kernel declares: the argument table is untyped, and a slip would read a number as an address.
    """

    name: str
    builder: Callable[..., Any]
    arguments: tuple[Any, ...]
    operands: tuple[str, ...] | None = None

    def build(self, traits: Traits) -> Any:
        """The kernel's PrimFunc, named and checked."""
        kernel = self.builder(traits, *self.arguments)
        declared = tuple(a.kind if a.kind in ("i64", "f32") else "buffer" for a in kernel.arguments)
        if self.operands is not None and self.operands != declared:
            raise AssertionError(f"kernel {self.name} declares {declared}, its launch passes {self.operands}")
        return kernel.function.with_attr("global_symbol", self.name)


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
    functions = {r.name: r.build(traits) for r in requests}
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
    distinct = list({r.name: r for r in requests}.values())
    find_linker()
    workers = processes or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        directory = Path(folder)
        objects: list[Path] = []
        # spawn, not fork: LLVM and TVM hold threads and locks that do not survive a fork
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            with _interrupts_blocked():  # the first job starts the processes
                jobs = [pool.submit(compile_objects, traits.name, batch, directory, index == 0)
                        for index, batch in enumerate(_batches(distinct, workers))]
            try:
                for job in jobs:
                    compiled = job.result()
                    objects += compiled
                    progress(len(compiled))
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise
        link(objects, output)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started within never get the SIGINT that a terminal sends to all of them: this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _batches(requests: Sequence[KernelRequest], workers: int) -> Iterator[list[KernelRequest]]:
    """Small batches, so that the processes finish together; at least one, for the executor."""
    size = max(1, min(4, len(requests) // (4 * workers)))
    for start in range(0, max(1, len(requests)), size):
        yield list(requests[start : start + size])
