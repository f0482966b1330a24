"""ChooseForms: every linear's input takes the form that its weights' block format wants.

Inserts `quantise` in front of linears; several linears of one input share it. Runs after the merging passes.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module


def choose_forms(module: tvm.IRModule, forms: Mapping[str, str]) -> tvm.IRModule:
    """`forms`: the activation form each weight reads, by parameter name."""
    quantised: dict[tuple[Rewriter, Expr, str], Expr] = {}

    def in_form(r: Rewriter, x: Expr, form: str) -> Expr:
        if form == "f32":
            return r.new(x)
        key = (r, x, form)
        if key not in quantised:
            quantised[key] = r.emit(op.quantise(r.new(x), form), f"{x.name}_{form}")
        return quantised[key]

    def rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
        name = op.name_of(value)
        if name == "dflashc.linear_group":
            (x,), weights, biases, _ = op.operands(value)
            wanted = list(dict.fromkeys(forms[w.name] for w in weights))
            return op.linear_group([in_form(r, x, f) for f in wanted], list(weights), list(biases), wanted)
        if name == "dflashc.gated_linear":
            x, gate, up, activation, _, result = op.operands(value)
            form = forms[gate.name]
            return op.gated_linear(in_form(r, x, form), gate, up, op.scalar(activation), form, op.scalar(result))
        if name == "dflashc.linear_argmax":
            x, weight, d2t, _ = op.operands(value)
            return op.linear_argmax(in_form(r, x, forms[weight.name]), weight, list(d2t), forms[weight.name])
        if name == "dflashc.kv_injection":
            (x,), weights, biases, norms, table, caches, state, heads, size, pairing, epsilon, _ = op.operands(value)
            wanted = list(dict.fromkeys(forms[w.name] for w in weights))
            xs = [in_form(r, x, f) for f in wanted]
            return op.kv_injection(xs, list(weights), list(biases), list(norms), r.new(table), list(caches), state,
                                   op.scalar(heads), op.scalar(size), op.scalar(pairing), op.scalar(epsilon), wanted)
        return None

    return rewrite_module(module, rule)
