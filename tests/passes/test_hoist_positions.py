"""HoistPositions: rope tables that all functions of a module share."""
# mypy: disable-error-code="valid-type,attr-defined,misc"

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from dflashc.passes.hoist_positions import hoist_positions

Q, TOKENS, STATE = R.Tensor((4, 2, 8), "float32"), R.Tensor((4,), "int32"), R.Tensor((8,), "int64")
FREQUENCIES, TABLE = R.Tensor((4,), "float64"), R.Tensor((2, 4, 4), "float32")


@I.ir_module
class Before:
    @R.function
    def decode(tokens: TOKENS, state: STATE, a: FREQUENCIES, b: FREQUENCIES, q: Q):
        with R.dataflow():
            t = R.call_pure_packed("dflashc.rope_table", tokens, state, b, T.float64(1.5), ty_args=TABLE)
            u = R.call_pure_packed("dflashc.rope_table", tokens, state, a, T.float64(1.0), ty_args=TABLE)
            x = R.call_pure_packed("dflashc.rope", q, t, R.str("neox"), ty_args=Q)
            y = R.call_pure_packed("dflashc.rope", x, u, R.str("neox"), ty_args=Q)
            R.output(y)
        return y

    @R.function
    def draft(block: TOKENS, state: STATE, a: FREQUENCIES, q: Q):
        with R.dataflow():
            t = R.call_pure_packed("dflashc.rope_table", block, state, a, T.float64(1.0), ty_args=TABLE)
            y = R.call_pure_packed("dflashc.rope", q, t, R.str("neox"), ty_args=Q)
            R.output(y)
        return y

    @R.function
    def logits(q: Q):
        with R.dataflow():
            y = R.nn.silu(q)
            R.output(y)
        return y


@I.ir_module
class After:
    @R.function
    def decode(tokens: TOKENS, state: STATE, a: FREQUENCIES, b: FREQUENCIES, q: Q, table_b: TABLE, table_a: TABLE):
        with R.dataflow():
            x = R.call_pure_packed("dflashc.rope", q, table_b, R.str("neox"), ty_args=Q)
            y = R.call_pure_packed("dflashc.rope", x, table_a, R.str("neox"), ty_args=Q)
            R.output(y)
        return y

    @R.function
    def draft(block: TOKENS, state: STATE, a: FREQUENCIES, q: Q, table_a: TABLE):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.rope", q, table_a, R.str("neox"), ty_args=Q)
            R.output(y)
        return y

    @R.function
    def logits(q: Q):
        with R.dataflow():
            y = R.nn.silu(q)
            R.output(y)
        return y

    @R.function(private=True)
    def positions(tokens: TOKENS, state: STATE, b: FREQUENCIES, a: FREQUENCIES):
        with R.dataflow():
            t = R.call_pure_packed("dflashc.rope_table", tokens, state, a, T.float64(1.0), ty_args=TABLE)
            u = R.call_pure_packed("dflashc.rope_table", tokens, state, b, T.float64(1.5), ty_args=TABLE)
            result = (t, u)
            R.output(result)
        return result


def test_tables_of_all_functions_are_computed_by_one() -> None:
    canonical = relax.transform.CanonicalizeBindings()
    tvm.ir.assert_structural_equal(canonical(hoist_positions(Before)), canonical(After))


def test_a_module_without_tables_is_left_alone() -> None:
    module = tvm.IRModule({"logits": Before["logits"]})
    tvm.ir.assert_structural_equal(hoist_positions(module), module)
