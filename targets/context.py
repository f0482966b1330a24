"""What a lowering rule sees: the operands of a fused call, fresh buffers, and a list of launches to add to.

One `ProgramContext` per program (a function at a fixed number of rows). Targets supply the rules; this module knows no
kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax, tirx

from dflashc.passes.operators import Expr
from dflashc.runtime.plan import Buffer, Launch, Operand, Units

Parts = Operand | list["Parts"]
"""A value's memory: one operand per tensor, nested like its Relax type."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight as the target stores it: logical (rows, columns), packed `format`, the activation `form` it reads."""

    name: str
    format: str
    form: str
    rows: int
    columns: int
    bytes: int


@dataclass(frozen=True)
class Variants:
    """Kernels that a launch may call, its own among them, by name; all launches of one `choice` take the same."""

    choice: str
    requests: Mapping[str, Any]


@dataclass(frozen=True)
class Cache:
    """A layer's K or V cache: its type, see `runtime.kv_types`, where it begins, and the tokens it holds."""

    type: str
    begin: Operand
    capacity: Operand


@dataclass
class ProgramContext:
    """A program under construction.

    Attributes
    ----------
    rows : int
        M, the rows of this program.
    caches : mapping
        K and V caches by parameter name.
    temporaries : dict
        Bytes of each intermediate buffer; operands of kind "temporary" name them until memory is planned.
    shared : dict
        Buffers that all programs share, e.g. scratch whose size depends on the context.
    requests : dict
        Kernels to compile, by symbol.
    placed : dict
        Memory already chosen for a variable, or for (variable, index of its part): the program's results.
    adjacent : list
        Runs of weights that must lie one behind the other.
    """

    rows: int
    weights: Mapping[str, PackedWeight]
    caches: Mapping[str, Cache] = field(default_factory=dict)
    shared: dict[str, Buffer] = field(default_factory=dict)
    temporaries: dict[str, int] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    requests: dict[str, Any] = field(default_factory=dict)
    values: dict[Expr, Parts] = field(default_factory=dict)
    placed: dict[Any, Parts] = field(default_factory=dict)
    adjacent: list[list[str]] = field(default_factory=list)

    def parts(self, expr: Expr) -> Parts:
        """The memory of a variable, tuple or tuple item."""
        if isinstance(expr, relax.Tuple):
            return [self.parts(f) for f in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            items = self.parts(expr.tuple_value)
            assert isinstance(items, list)
            return items[expr.index]
        return self.values[expr]

    def operands(self, expr: Expr) -> list[Operand]:
        """`parts` as a flat list."""
        return flatten(self.parts(expr))

    def operand(self, expr: Expr) -> Operand:
        """The memory of a single tensor."""
        (only,) = self.operands(expr)
        return only

    def weight(self, expr: Expr) -> PackedWeight:
        return self.weights[expr.name]

    def cache(self, expr: Expr) -> Cache:
        return self.caches[expr.name]

    def result(self, var: Expr) -> Parts:
        """Memory for the call bound to `var`, which it also records."""
        if var in self.placed:
            parts: Parts = self.placed[var]
        elif isinstance(var.ty, relax.TupleType):
            parts = [self.placed.get((var, i)) or self.allocate(f) for i, f in enumerate(var.ty.fields)]
        else:
            parts = self.allocate(var.ty)
        self.values[var] = parts
        return parts

    def allocate(self, of_type: relax.Type) -> Parts:
        """Temporaries for a value of this Relax type, with M in place of the symbolic row count."""
        if isinstance(of_type, relax.TupleType):
            return [self.allocate(f) for f in of_type.fields]
        return self.temporary(self._bytes(of_type))

    def _bytes(self, of_type: relax.TensorType) -> int:
        dimensions = [int(d) if isinstance(d, tirx.IntImm) else self.rows for d in of_type.shape.values]
        return int(np.prod(dimensions, dtype=np.int64)) * np.dtype(str(of_type.dtype)).itemsize

    def require_room(self, of_type: relax.Type, parts: Parts) -> None:
        """Raise `AssertionError` where a value of this type does not fit the buffer that is given for it: kernels would
        write behind its end.
        """
        if isinstance(of_type, relax.TupleType):
            for field_type, part in zip(of_type.fields, parts if isinstance(parts, list) else [parts], strict=True):
                self.require_room(field_type, part)
            return
        assert isinstance(parts, Operand)
        if parts.kind == "buffer":
            room, need = self.shared[parts.name].bytes - int(parts.value), self._bytes(of_type)
            assert need <= room, f"{need} bytes for {self.rows} rows do not fit the {room} of buffer {parts.name}"

    def temporary(self, nbytes: int) -> Operand:
        name = f"t{len(self.temporaries)}"
        self.temporaries[name] = nbytes
        return Operand("temporary", name)

    def keep_adjacent(self, names: list[str]) -> None:
        """Ask for these weights to be stored one behind the other, in this order."""
        if len(names) > 1 and names not in self.adjacent:
            self.adjacent.append(names)

    def share(self, buffer: Buffer) -> Operand:
        """A buffer common to all programs; its size is the largest that any of them asks for."""
        known = self.shared.get(buffer.name, buffer)
        self.shared[buffer.name] = Buffer(buffer.name, buffer.role, max(known.bytes, buffer.bytes),
                                          max(known.bytes_per_token, buffer.bytes_per_token))
        return Operand("buffer", buffer.name)

    def launch(self, request: Any, operation: str, units: Units, operands: Sequence[Operand | int | float], *,
               grain: int = 1, barrier: bool = True, bytes_read: int = 0, flops: int = 0,
               variants: Variants | None = None) -> None:
        """Add a launch; ints and floats among `operands` become scalars."""
        table = tuple(o if isinstance(o, Operand) else Operand("i64", "", o) if isinstance(o, int)
                      else Operand("f32", "", o) for o in operands)
        kinds = tuple({"f32": "f32", "i64": "i64", "context": "i64"}.get(o.kind, "buffer") for o in table)
        others = variants.requests if variants else {}
        for each in (request, *others.values()):
            self.requests[each.name] = dataclasses.replace(each, operands=kinds)
        self.launches.append(Launch(request.name, operation, units, grain, table, barrier, bytes_read, flops,
                                    variants.choice if variants else "", tuple((n, r.name) for n, r in others.items())))


Rule = Callable[[ProgramContext, Expr, Expr], None]
"""rule(context, variable, call): add launches and set `context.values[variable]`."""


def flatten(parts: Parts) -> list[Operand]:
    if isinstance(parts, Operand):
        return [parts]
    return [operand for part in parts for operand in flatten(part)]
