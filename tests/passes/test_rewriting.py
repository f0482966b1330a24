"""The copy that all passes are made with: what it carries over, drops and refuses to touch."""
# mypy: disable-error-code="valid-type,attr-defined"

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite, rewrite_module
from tests.passes.compare import assert_rewrites, module_of

X = R.Tensor((4, 8), "float32")


@I.ir_module
class Module:
    I.module_attrs({"model": "tiny"})

    @T.prim_func(private=True)
    def kernel(x: T.Buffer((4,), "float32")):
        x[0] = T.float32(0)

    @R.function
    def first(x: X):
        R.func_attr({"role": "decode", "rows": 4})
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y

    @R.function(private=True)
    def second(x: R.Tensor(("m", 8), "float32")):
        with R.dataflow():
            y = R.multiply(x, x)
            R.output(y)
        return y


def keep(r: Rewriter, var: Expr, value: Expr) -> None:
    return None


def test_attributes_and_other_functions_are_kept() -> None:
    copied = rewrite_module(Module, keep)
    tvm.ir.assert_structural_equal(relax.transform.CanonicalizeBindings()(copied), Module)
    assert copied.attrs["model"] == "tiny"
    assert copied["first"].attrs["role"] == "decode"
    assert copied["first"].attrs["global_symbol"] == "first"
    assert copied["second"].attrs is None or "global_symbol" not in copied["second"].attrs


def test_the_copy_leaves_the_original_alone() -> None:
    before = Module.script()
    rewrite_module(Module, lambda r, var, value: r.new(value.args[0]) if isinstance(value, relax.Call) else None)
    assert Module.script() == before


def test_what_is_no_longer_used_is_dropped() -> None:
    @R.function
    def before(x: X):
        with R.dataflow():
            a = R.add(x, x)
            b = R.multiply(a, a)
            c = R.nn.silu(b)
            R.output(c)
        return c

    @R.function
    def after(x: X):
        with R.dataflow():
            c = R.nn.silu(x)
            R.output(c)
        return c

    def rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
        return r.new(r.function.params[0]) if op.name_of(value) == "relax.multiply" else None

    assert_rewrites(lambda m: rewrite_module(m, rule), before, after)


def test_one_binding_may_stand_for_several() -> None:
    @R.function
    def before(x: X):
        with R.dataflow():
            a = R.add(x, x)
            b = R.multiply(x, x)
            result = (b, a, x)
            R.output(result)
        return result

    @R.function
    def after(x: X):
        with R.dataflow():
            s = R.nn.silu(x)
            g = R.nn.gelu_tanh(x)
            result = (g, s, x)
            R.output(result)
        return result

    def rule(r: Rewriter, var: Expr, value: Expr) -> None:
        if op.name_of(value) == "relax.add":
            r.replace(var, r.emit(relax.op.nn.silu(r.new(value.args[0]))))
            for user in [u for u in r.users(value.args[0]) if r.is_call(u, "relax.multiply")]:
                r.replace(user, r.emit(relax.op.nn.gelu_tanh(r.new(value.args[0]))))

    assert_rewrites(lambda m: rewrite_module(m, rule), before, after)


def test_uses() -> None:
    @R.function
    def function(x: X):
        with R.dataflow():
            once = R.add(x, x)
            twice = R.multiply(once, x)
            both = R.add(twice, twice)
            returned = R.nn.silu(both)
            R.output(returned, both)
        return (returned, both)

    seen = {}

    def rule(r: Rewriter, var: Expr, value: Expr) -> None:
        seen[var.name] = (len(r.users(var)), r.used_once(var), r.is_result(var))

    rewrite_module(module_of(function), rule)
    assert seen == {"once": (1, True, False), "twice": (2, False, False), "both": (1, False, True),
                    "returned": (0, False, True)}


def test_a_result_under_another_name_is_the_result() -> None:
    copied = rewrite_module(Module, keep)["first"]
    assert isinstance(copied.body.blocks[0].bindings[-1].value, relax.Var)  # the copy renames what it returns
    seen = {}

    def rule(r: Rewriter, var: Expr, value: Expr) -> None:
        seen[op.name_of(value)] = (r.used_once(var), r.is_result(var))

    rewrite_module(module_of(copied), rule)
    assert seen["relax.add"] == (False, True)


def test_parameters_are_replaced_and_added() -> None:
    @R.function
    def before(x: X, z: X):
        with R.dataflow():
            a = R.nn.silu(x)
            b = R.add(a, z)
            R.output(b)
        return b

    @R.function
    def after(a: X, z: X, added: X):
        with R.dataflow():
            b = R.add(a, added)
            R.output(b)
        return b

    activated, added = (relax.Var(name, before.params[0].ty) for name in ("a", "added"))

    def rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
        if op.name_of(value) == "relax.nn.silu":
            return activated
        return relax.op.add(r.new(value.args[0]), added) if op.name_of(value) == "relax.add" else None

    new = rewrite(before, rule, {before.params[0]: activated}, [added])
    plain = relax.transform.CanonicalizeBindings()
    tvm.ir.assert_structural_equal(plain(module_of(new)), plain(module_of(after)))


def test_names_and_operands() -> None:
    @R.function
    def function(x: X):
        with R.dataflow():
            a = R.call_pure_packed("dflashc.softcap", x, T.float64(30.0), ty_args=X)
            b = R.add(a, x)
            R.output(b)
        return b

    (a, softcap), (_, add) = [(b.var, b.value) for block in function.body.blocks for b in block.bindings]
    assert (op.name_of(softcap), op.name_of(add), op.name_of(a)) == ("dflashc.softcap", "relax.add", "")
    tensor, cap = op.operands(softcap)
    assert tensor.same_as(function.params[0])
    assert (op.is_scalar(tensor), op.is_scalar(cap), op.scalar(cap)) == (False, True, 30.0)
    assert [o.same_as(e) for o, e in zip(op.operands(add), (a, tensor), strict=True)] == [True, True]
