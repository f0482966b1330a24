"""From a rewritten Relax function to a program: every fused call becomes launches, every value gets memory.

The target supplies one rule per operator; an operator without a rule fails the build. Knows no kernel and no format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax

from dflashc.compiler.lower.memory import Lifetime, plan_memory, step_of_launches
from dflashc.passes.operators import name_of
from dflashc.runtime.errors import BuildError
from dflashc.runtime.plan import Buffer, Launch, Operand, Program
from dflashc.targets.context import Cache, PackedWeight, Parts, ProgramContext, Rule

ARENA = "arena"


@dataclass(frozen=True)
class LoweredProgram:
    """A program, its bytes of arena, the kernels it calls by symbol, and weights that must lie side by side."""

    program: Program
    arena_bytes: int
    requests: dict[str, Any]
    adjacent: list[list[str]]


@dataclass(frozen=True)
class Lowering:
    """What all programs of a build share.

    Attributes
    ----------
    target : str
        Its name, for messages.
    buffers : dict
        Buffers common to all programs; rules may add some.
    """

    target: str
    rules: Mapping[str, Rule]
    weights: Mapping[str, PackedWeight]
    caches: Mapping[str, Cache]
    buffers: dict[str, Buffer]

    def lower(self, function: relax.Function, role: str, rows: int, parameters: Mapping[str, Parts],
              outputs: Sequence[Parts]) -> LoweredProgram:
        """Lower `function` at M = `rows`.

        Parameters
        ----------
        parameters : mapping
            Memory of the parameters that are neither weights nor buffers of the same name.
        outputs : sequence
            Memory that receives the function's results, in order; empty where nobody reads them.
        """
        context = ProgramContext(rows, self.weights, self.caches, self.buffers)
        for parameter in function.params:
            context.values[parameter] = self._parameter(parameter.name, parameters)
            if parameter.name in parameters:
                context.require_room(parameter.ty, parameters[parameter.name])
        bindings = [(b.var, b.value) for block in function.body.blocks for b in block.bindings]
        if outputs:
            _place_outputs(function, bindings, outputs, context)
        for var, value in bindings:
            if isinstance(value, relax.Var | relax.Tuple | relax.TupleGetItem):
                context.values[var] = context.parts(value)
                continue
            rule = self.rules.get(name_of(value))
            if rule is None:
                raise BuildError(f"operation {name_of(value) or value} has no kernel on target {self.target}")
            rule(context, var, value)
        return _finish(role, rows, context)

    def _parameter(self, name: str, parameters: Mapping[str, Parts]) -> Parts:
        if name in parameters:
            return parameters[name]
        if name in self.weights:
            return Operand("weight", name)
        if name in self.caches:
            return self.caches[name].begin
        if name not in self.buffers:
            raise BuildError(f"parameter {name} is neither a weight nor a buffer")
        return Operand("buffer", name)


def _place_outputs(function: relax.Function, bindings: list[tuple[Any, Any]], outputs: Sequence[Parts],
                   context: ProgramContext) -> None:
    """Let the variables that the function returns live in the memory given."""
    bound = dict(bindings)

    def resolve(expr: Any) -> Any:
        while isinstance(bound.get(expr), relax.Var):
            expr = bound[expr]
        return bound[expr] if isinstance(bound.get(expr), relax.Tuple) else expr

    final = resolve(function.body.body)
    returned = [resolve(f) for f in final.fields] if isinstance(final, relax.Tuple) else [final]
    returns = function.ret_ty
    types = returns.fields if isinstance(returns, relax.TupleType) and isinstance(final, relax.Tuple) else [returns]
    for var, of_type, parts in zip(returned, types, outputs, strict=True):
        context.require_room(of_type, parts)
        item = bound.get(var)
        place = (item.tuple_value, item.index) if isinstance(item, relax.TupleGetItem) else var
        if place in context.placed:
            raise BuildError("two results of a function are the same value; each needs memory of its own")
        context.placed[place] = parts


def _finish(role: str, rows: int, context: ProgramContext) -> LoweredProgram:
    """Place the temporaries and turn their operands into arena offsets."""
    steps = step_of_launches([x.barrier for x in context.launches])
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step, launch in zip(steps, context.launches, strict=True):
        for operand in launch.operands:
            if operand.kind == "temporary":
                first.setdefault(operand.name, step)
                last[operand.name] = step
    offsets, size = plan_memory([Lifetime(n, context.temporaries[n], first[n], last[n]) for n in first])

    def place(operand: Operand) -> Operand:
        if operand.kind != "temporary":
            return operand
        return Operand("buffer", ARENA, offsets[operand.name] + int(operand.value))

    launches: list[Launch] = [replace(x, operands=tuple(place(o) for o in x.operands)) for x in context.launches]
    return LoweredProgram(Program(role, rows, tuple(launches)), size, context.requests, context.adjacent)
