"""HoistPositions: the rope tables of all functions move into one, `positions`, which a run computes once.

Target and drafter, verify, draft and injection of a round all work on rows at the same positions. Each function gets
its tables as parameters "rope.<name>" instead, named after their frequencies "rope.<name>.frequencies".
"""

from __future__ import annotations

import tvm
from tvm import relax

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite

FUNCTION = "positions"


def hoist_positions(module: tvm.IRModule) -> tvm.IRModule:
    result = tvm.IRModule(attrs=module.attrs)
    tables: dict[str, Expr] = {}
    for variable, function in module.functions.items():
        result[variable.name_hint] = _hoist(function, tables)
    if tables:
        result[FUNCTION] = _positions(tables)
    return result


def _hoist(function: relax.Function, tables: dict[str, Expr]) -> relax.Function:
    """`function` with its rope tables as parameters; the calls are added to `tables` by name."""
    parameters: dict[str, Expr] = {}
    for binding in (b for block in function.body.blocks for b in block.bindings):
        if op.name_of(binding.value) == "dflashc.rope_table":
            name = op.operands(binding.value)[2].name.removesuffix(".frequencies")
            tables.setdefault(name, binding.value)
            parameters[name] = relax.Var(name, binding.var.ty)
    if not parameters:
        return function

    def rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
        if op.name_of(value) != "dflashc.rope_table":
            return None
        return parameters[op.operands(value)[2].name.removesuffix(".frequencies")]

    return rewrite(function, rule, added=list(parameters.values()))


def _positions(tables: dict[str, Expr]) -> relax.Function:
    """`positions(tokens (m,), state, frequencies…) -> tables`, in the order of their names."""
    builder = relax.BlockBuilder()
    first = next(iter(tables.values()))
    tokens = relax.Var("tokens", op.operands(first)[0].ty)
    state = relax.Var("state", op.operands(first)[1].ty)
    frequencies = {name: relax.Var(f"{name}.frequencies", op.operands(call)[2].ty) for name, call in tables.items()}
    with builder.function(FUNCTION, [tokens, state, *frequencies.values()]):
        with builder.dataflow():
            magnitudes = {name: op.scalar(op.operands(call)[3]) for name, call in tables.items()}
            results = [builder.emit(op.rope_table(tokens, state, frequencies[name], magnitudes[name]), name)
                       for name in sorted(tables)]
            output = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(output)
    function = builder.get()[FUNCTION].without_attr("global_symbol")
    return relax.utils.copy_with_new_vars(function)  # its number of rows is its own
