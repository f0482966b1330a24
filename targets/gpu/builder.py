"""A thin layer over TVM's IR builder for GPU kernels: buffers, workgroups, shared memory, barriers.

A kernel is a device function from the start: its parameters are the buffers in order, then the scalars in order, and
its body runs once per thread of a one-dimensional grid of workgroups. Indices are int32. Sizes such as N, K and the
context length are arguments, so that one compiled kernel serves every shape. Knows nothing of block formats or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.traits import Traits

Expr: TypeAlias = Any
"""A `tirx.Expr` or buffer; its operators live in TVM's C++, where type checkers do not see them."""

_UNBOUNDED = 1 << 30  # elements: kernels see raw pointers; the plan knows the sizes
MOST_GROUPS = 65535
"""Workgroups of a launch: what every Vulkan device takes, and what bounds of indices are deduced from."""


@dataclass(frozen=True)
class Argument:
    """A parameter: a buffer of `kind` elements ("float32", "uint8", …), or a scalar ("i32" or "f32")."""

    name: str
    kind: str

    @property
    def is_scalar(self) -> bool:
        return self.kind in ("i32", "f32")


@dataclass(frozen=True)
class Kernel:
    """A kernel before code generation.

    Attributes
    ----------
    function : tirx.PrimFunc
        Parameters: the buffers in order, then the scalars in order.
    arguments : tuple of Argument
        In the order in which launches pass them.
    threads : int
        Threads of a workgroup.
    shared_bytes : int
        Workgroup memory.
    """

    name: str
    function: tirx.PrimFunc
    arguments: tuple[Argument, ...]
    threads: int
    shared_bytes: int


def const(value: float, dtype: str) -> Expr:
    return tirx.const(value, dtype)


def i32(value: int) -> Expr:
    return tirx.const(value, "int32")


def u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


def f32(value: float) -> Expr:
    return tirx.const(value, "float32")


def bind(value: Expr) -> Expr:
    """Name a value (SSA), so that it is computed once."""
    return T.bind(value)


def load(buffer: Expr, index: Expr | int) -> Expr:
    """The element at `index`."""
    return tirx.BufferLoad(buffer, [i32(index) if isinstance(index, int) else index])


def load4(buffer: Expr, index: Expr) -> list[Expr]:
    """Four elements from `4 * index` on, as one vector load where the target has it."""
    vector = bind(tirx.BufferLoad(buffer, [tirx.Ramp(index * 4, i32(1), 4)]))
    return [tirx.Shuffle([vector], [i32(lane)]) for lane in range(4)]


def store(buffer: Expr, index: Expr | int, value: Expr) -> None:
    T.buffer_store(buffer, value, [i32(index) if isinstance(index, int) else index])


def cast(dtype: str, value: Expr) -> Expr:
    return tirx.Cast(dtype, value)


def reinterpret(dtype: str, value: Expr) -> Expr:
    return tirx.reinterpret(dtype, value)


def select(condition: Expr, true: Expr, false: Expr) -> Expr:
    """Both sides are computed; use `T.If` where one must not be (an address out of range)."""
    return tirx.Select(condition, true, false)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c, rounded once on every target; a plain `a * b + c` may or may not be, from one kernel to the next."""
    return tirx.call_intrin("float32", "tirx.fma", a, b, c)


def local(size: int, dtype: str) -> Expr:
    """A thread's own buffer; it stays in registers where all indices are constant after unrolling in Python."""
    return T.alloc_buffer((size,), dtype, scope="local")


def barrier() -> None:
    """All threads of the workgroup meet, and see what the others stored in shared and global memory before.

    Must be reached by all of them: never inside a branch or loop whose condition differs between threads.
    """
    T.evaluate(tirx.call_intrin("void", "tirx.tvm_storage_sync", "shared"))


def state_word(state: Expr, word: int) -> Expr:
    """Word `word` of the state block (int64 on the host, small and not negative) declared as an int32 buffer."""
    return bind(load(state, 2 * word))


@dataclass
class _Frame:
    arguments: list[Argument] = field(default_factory=list)
    threads: int = 0
    shared_bytes: int = 0


class KernelBuilder:
    """Builds one kernel: declare the arguments in the order of the launch, then write the body.

    >>> k = KernelBuilder("scale", traits)
    >>> arguments = [("x", "float32"), ("y", "float32"), ("count", "i32"), ("factor", "f32")]
    >>> with k.build(arguments) as (x, y, count, factor):
    ...     with k.workgroups(256) as (group, thread):
    ...         i = bind(group * 256 + thread)
    ...         with T.If(i < count), T.Then():
    ...             store(y, i, load(x, i) * factor)
    >>> k.kernel
    """

    def __init__(self, name: str, traits: Traits) -> None:
        self.name = name
        self.traits = traits
        self._frame = _Frame()
        self._function: tirx.PrimFunc | None = None

    @contextmanager
    def build(self, arguments: Sequence[tuple[str, str]]) -> Iterator[tuple[Expr, ...]]:
        """Yield the arguments: (name, kind) each, kind an element type, "i32" or "f32"."""
        declared = [Argument(*a) for a in arguments]
        self._frame = _Frame(declared)
        with IRBuilder() as builder:
            with T.prim_func():
                T.func_name(self.name)
                T.func_attr({"global_symbol": self.name, "tirx.noalias": True, "calling_conv": 2,
                             "tirx.is_global_func": True})
                values: dict[str, Expr] = {}
                for a in declared:
                    if not a.is_scalar:
                        values[a.name] = T.arg(a.name, T.handle(a.kind))
                for a in declared:
                    if a.is_scalar:
                        values[a.name] = T.arg(a.name, T.int32() if a.kind == "i32" else T.float32())
                for a in declared:
                    if not a.is_scalar:
                        values[a.name] = T.decl_buffer((_UNBOUNDED,), a.kind, data=values[a.name])
                yield tuple(values[a.name] for a in declared)
            self._function = builder.get()

    @contextmanager
    def workgroups(self, threads: int) -> Iterator[tuple[Expr, Expr]]:
        """The grid: yields the workgroup's index and the thread's index in it, both int32."""
        self._frame.threads = threads
        with T.launch_thread("blockIdx.x", MOST_GROUPS) as group, T.launch_thread("threadIdx.x", threads) as thread:
            yield group, thread

    def shared(self, size: int, dtype: str) -> Expr:
        """`size` elements that all threads of the workgroup see."""
        self._frame.shared_bytes += size * tvm.DataType(dtype).bits // 8
        return T.alloc_buffer((size,), dtype, scope="shared")

    @property
    def kernel(self) -> Kernel:
        assert self._function is not None, "build() has not run"
        frame = self._frame
        return Kernel(self.name, self._function, tuple(frame.arguments), frame.threads, frame.shared_bytes)
