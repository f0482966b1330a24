"""Straight-line rewriting: the one mechanism that all passes use.

A model's function is one dataflow block of bindings. `rewrite` copies it binding by binding; a rule may replace a
binding, or several at once, by something else. What is no longer used is dropped at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tvm
from tvm import relax

from dflashc.passes.operators import Expr, name_of, operands


class Rewriter:
    """A function being copied: look at the old bindings, emit new ones.

    Attributes
    ----------
    builder : relax.BlockBuilder
        Where new bindings go.
    """

    def __init__(self, function: relax.Function) -> None:
        self.function = function
        self.bindings = [(b.var, b.value) for block in function.body.blocks for b in block.bindings]
        self.builder = relax.BlockBuilder()
        self._values = dict(self.bindings)
        self._users: dict[Expr, list[Expr]] = {}
        self._replaced: dict[Expr, Expr] = {}
        for var, value in self.bindings:
            for used in _variables(value):
                self._users.setdefault(used, []).append(var)

    def value(self, expr: Expr) -> Expr:
        """The old binding behind a variable; anything else as it is."""
        return self._values.get(expr, expr)

    def is_call(self, expr: Expr, name: str) -> bool:
        """Whether `expr`, or the variable's binding, is a call of operator `name`."""
        return name_of(self.value(expr)) == name

    def arguments(self, expr: Expr) -> list[Expr]:
        """Operands of the call behind `expr` (old variables)."""
        return operands(self.value(expr))

    def users(self, var: Expr) -> list[Expr]:
        """Old variables whose bindings use `var`."""
        return self._users.get(var, [])

    def used_once(self, var: Expr) -> bool:
        return len(self.users(var)) == 1 and not self.is_result(var)

    def is_result(self, var: Expr) -> bool:
        """Whether the function returns `var`, alone or in a tuple that is not bound to a variable."""
        result = self.function.body.body
        while not result.same_as(var) and isinstance(self._values.get(result), relax.Var):
            result = self._values[result]
        return any(var.same_as(returned) for returned in _variables(result))

    def new(self, expr: Expr) -> Expr:
        """The same expression in terms of the new variables."""
        if expr in self._replaced:
            return self._replaced[expr]
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.new(f) for f in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self.new(expr.tuple_value), expr.index)
        if isinstance(expr, relax.Call):
            return tvm.ir.Call(expr.op, [self.new(a) for a in expr.args], expr.attrs, expr.ty_args)
        return expr

    def split_part(self, reshaped: Expr) -> tuple[Expr, int] | None:
        """(merged tensor, index) behind reshape(split(merged)[index])."""
        if not self.is_call(reshaped, "relax.reshape"):
            return None
        item = self.value(self.arguments(reshaped)[0])
        if not isinstance(item, relax.TupleGetItem) or not self.is_call(item.tuple_value, "relax.split"):
            return None
        return self.arguments(item.tuple_value)[0], item.index

    def emit(self, expr: Expr, name: str = "") -> Expr:
        """Bind a new expression; returns its variable."""
        return self.builder.emit(expr, name_hint=name)

    def replace(self, var: Expr, expr: Expr) -> None:
        """Let `expr` (new) stand for the old variable `var`, whose own binding is then not copied."""
        self._replaced[var] = expr


Rule = Callable[[Rewriter, Expr, Expr], Expr | None]
"""rule(rewriter, old variable, old value) returns the new value, or None to keep the binding (or after `replace`)."""


def rewrite(function: relax.Function, rule: Rule, parameters: Mapping[Expr, Expr] | None = None,
            added: Sequence[Expr] = ()) -> relax.Function:
    """Copy `function`, asking `rule` at every binding.

    `parameters` maps those that are replaced to the new ones; `added` are put behind the function's own.
    """
    old = Rewriter(function)
    replaced = dict(parameters or {})
    for parameter, new_parameter in replaced.items():
        old.replace(parameter, new_parameter)
    builder = old.builder
    with builder.function("function", [*(replaced.get(p, p) for p in function.params), *added]):
        with builder.dataflow():
            for var, value in old.bindings:
                if var in old._replaced:
                    continue
                new = rule(old, var, value)
                if var in old._replaced:
                    continue
                if new is None:
                    new = old.new(value)
                old.replace(var, new if isinstance(new, relax.Var) else old.emit(new, var.name))
            result = builder.emit_output(old.new(function.body.body))
        builder.emit_func_output(result)
    module = relax.transform.DeadCodeElimination()(builder.get())
    new_function = module["function"].without_attr("global_symbol")
    if function.attrs is not None:
        new_function = new_function.with_attrs(dict(function.attrs.items()))
    return new_function


def rewrite_module(module: tvm.IRModule, rule: Rule) -> tvm.IRModule:
    """`rewrite` every Relax function of a module."""
    result = tvm.IRModule(attrs=module.attrs)
    for variable, function in module.functions.items():
        result[variable.name_hint] = rewrite(function, rule) if isinstance(function, relax.Function) else function
    return result


def _variables(expr: Expr) -> list[Expr]:
    if isinstance(expr, relax.Var):
        return [expr]
    if isinstance(expr, relax.Tuple):
        return [v for field in expr.fields for v in _variables(field)]
    if isinstance(expr, relax.TupleGetItem):
        return _variables(expr.tuple_value)
    if isinstance(expr, relax.Call):
        return [v for argument in expr.args for v in _variables(argument)]
    return []
