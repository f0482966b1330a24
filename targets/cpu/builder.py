"""A thin layer over TVM's IR builder for CPU kernels: vectors, loads, the kernel signature.

Every kernel has the signature `void kernel(int64* arguments, int64 begin, int64 end)`: it computes the independent
units [begin, end) and finds its buffers and sizes in the argument table. Sizes such as N, K and the context length are
arguments, so one compiled kernel serves every shape. Knows nothing of block formats or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.traits import Traits, broadcast, intrinsic

Expr: TypeAlias = Any
"""A `tirx.Expr` or buffer; its operators live in TVM's C++, where type checkers do not see them."""
_UNBOUNDED = 1 << 46  # elements: kernels see raw pointers; the plan knows the sizes


@dataclass(frozen=True)
class Argument:
    """One entry of the argument table: a buffer ("float32", "uint8", …) or a scalar ("i64" or "f32")."""

    name: str
    kind: str


@dataclass(frozen=True)
class Kernel:
    """A kernel before compilation.

    Attributes
    ----------
    name : str
        Symbol; equal names mean equal code.
    function : tirx.PrimFunc
        Body with the executor's signature.
    arguments : tuple of Argument
        The argument table's entries, in order.
    """

    name: str
    function: tirx.PrimFunc
    arguments: tuple[Argument, ...]


def const(value: float, dtype: str) -> Expr:
    """A constant; `dtype` may be a vector type, such as "float32x8"."""
    base, _, lanes = dtype.partition("x")
    scalar = tirx.const(value, base)
    return broadcast(scalar, int(lanes)) if lanes else scalar


def i64(value: int) -> Expr:
    return tirx.const(value, "int64")


def bind(value: Expr) -> Expr:
    """Name a value (SSA), so that it is computed once."""
    return T.bind(value)


def load(buffer: Expr, offset: Expr | int, lanes: int = 1) -> Expr:
    """`lanes` consecutive elements from `offset`."""
    if isinstance(offset, int):
        offset = i64(offset)
    if lanes == 1:
        return tirx.BufferLoad(buffer, [offset])
    return tirx.BufferLoad(buffer, [tirx.Ramp(offset, tirx.const(1, offset.ty.dtype), lanes)])


def store(buffer: Expr, offset: Expr | int, value: Expr, lanes: int = 1) -> None:
    """Store a scalar or a vector of `lanes` elements at `offset`."""
    if isinstance(offset, int):
        offset = i64(offset)
    index = offset if lanes == 1 else tirx.Ramp(offset, tirx.const(1, offset.ty.dtype), lanes)
    T.buffer_store(buffer, value, [index])


def cast(dtype: str, value: Expr) -> Expr:
    return tirx.Cast(dtype, value)


def reinterpret(dtype: str, value: Expr) -> Expr:
    return tirx.reinterpret(dtype, value)


def local(size: int, dtype: str) -> Expr:
    """A thread's own buffer with `size` elements; LLVM promotes it to registers where all indices are constant."""
    return T.alloc_buffer((size,), dtype, scope="local")


def maximum(a: Expr, b: Expr) -> Expr:
    return intrinsic(str(a.ty.dtype), "llvm.maxnum", a, b)


def reduce_pairs(values: Sequence[Expr], combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Combine a list pairwise, as a tree of fixed shape: the order never depends on anything else."""
    level = list(values)
    while len(level) > 1:
        paired = [bind(combine(level[i], level[i + 1])) for i in range(0, len(level) - 1, 2)]
        level = paired + ([level[-1]] if len(level) % 2 else [])
    return level[0]


class KernelBuilder:
    """Builds one kernel: declare the arguments in order, then write the body.

    >>> k = KernelBuilder("scale", traits)
    >>> with k.build():
    ...     x, y, factor = k.buffer("x", "float32"), k.buffer("y", "float32"), k.scalar("factor", "f32")
    ...     with k.units() as i:
    ...         store(y, i, load(x, i) * factor)
    >>> k.kernel
    """

    def __init__(self, name: str, traits: Traits) -> None:
        self.name = name
        self.traits = traits
        self._arguments: list[Argument] = []
        self._table: Expr | None = None
        self._begin: Expr | None = None
        self._end: Expr | None = None
        self._function: tirx.PrimFunc | None = None

    @contextmanager
    def build(self) -> Iterator[None]:
        with IRBuilder() as builder:
            with T.prim_func():
                T.func_name(self.name)
                T.func_attr({"global_symbol": self.name, "tirx.noalias": True})
                table = T.arg("arguments", T.handle("int64"))
                self._begin = T.arg("begin", T.int64())
                self._end = T.arg("end", T.int64())
                self._table = T.decl_buffer((64,), "int64", data=table)
                yield
            self._function = builder.get()

    def buffer(self, name: str, dtype: str) -> Expr:
        """The next argument: a buffer of `dtype` elements."""
        address = load(self._table, len(self._arguments))
        self._arguments.append(Argument(name, dtype))
        pointer = tvm.ir.PointerType(tvm.ir.PrimType(dtype))
        data = T.bind(tirx.reinterpret(pointer, address), pointer)
        return T.decl_buffer((i64(_UNBOUNDED),), dtype, data=data)

    def scalar(self, name: str, kind: str = "i64") -> Expr:
        """The next argument: an int64 ("i64"), or a float32 ("f32") in the low half of its entry."""
        entry = load(self._table, len(self._arguments))
        self._arguments.append(Argument(name, kind))
        if kind == "i64":
            return bind(entry)
        return bind(reinterpret("float32", cast("int32", entry)))

    @contextmanager
    def units(self) -> Iterator[Expr]:
        """The loop over this call's units."""
        with T.serial(self._begin, self._end) as unit:
            yield unit

    @property
    def kernel(self) -> Kernel:
        assert self._function is not None, "build() has not run"
        return Kernel(self.name, self._function, tuple(self._arguments))
