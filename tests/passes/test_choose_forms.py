"""ChooseForms: where activations are quantised, and how often."""
# mypy: disable-error-code="valid-type"

import tvm
from tvm.script import relax as R

from dflashc.passes.choose_forms import choose_forms
from tests.passes.compare import assert_keeps, assert_rewrites

X, W, Y, Y2 = (R.Tensor(shape, "float32") for shape in ((4, 256), (6, 256), (4, 6), (4, 12)))
IDS = R.Tensor((4,), "int32")
Q32 = R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 8), "float32"), R.Tensor((4, 8), "int32"))
Q256 = R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 1), "float32"), R.Tensor((4, 16), "int16"))

FORMS = {"plain": "f32", "by32": "q8_32", "also32": "q8_32", "by256": "q8_256"}


def choose(module: tvm.IRModule) -> tvm.IRModule:
    return choose_forms(module, FORMS)


def test_weights_of_one_form_share_its_quantisation() -> None:
    @R.function
    def before(x: X, by32: W, also32: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (by32, also32), R.tuple(), R.str("f32"), ty_args=Y2)
            R.output(y)
        return y

    @R.function
    def after(x: X, by32: W, also32: W):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.quantise", x, R.str("q8_32"), ty_args=Q32)
            y = R.call_pure_packed("dflashc.linear_group", (q,), (by32, also32), R.tuple(), R.str("q8_32"), ty_args=Y2)
            R.output(y)
        return y

    assert_rewrites(choose, before, after)


def test_calls_of_one_input_share_its_quantisation() -> None:
    @R.function
    def before(x: X, z: X, by32: W, also32: W):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.linear_group", (x,), (by32,), R.tuple(), R.str("f32"), ty_args=Y)
            q = R.call_pure_packed("dflashc.linear_group", (x,), (also32,), R.tuple(), R.str("f32"), ty_args=Y)
            r = R.call_pure_packed("dflashc.linear_group", (z,), (also32,), R.tuple(), R.str("f32"), ty_args=Y)
            result = (p, q, r)
            R.output(result)
        return result

    @R.function
    def after(x: X, z: X, by32: W, also32: W):
        with R.dataflow():
            x1 = R.call_pure_packed("dflashc.quantise", x, R.str("q8_32"), ty_args=Q32)
            p = R.call_pure_packed("dflashc.linear_group", (x1,), (by32,), R.tuple(), R.str("q8_32"), ty_args=Y)
            q = R.call_pure_packed("dflashc.linear_group", (x1,), (also32,), R.tuple(), R.str("q8_32"), ty_args=Y)
            z1 = R.call_pure_packed("dflashc.quantise", z, R.str("q8_32"), ty_args=Q32)
            r = R.call_pure_packed("dflashc.linear_group", (z1,), (also32,), R.tuple(), R.str("q8_32"), ty_args=Y)
            result = (p, q, r)
            R.output(result)
        return result

    assert_rewrites(choose, before, after)


def test_functions_share_nothing() -> None:
    @R.function
    def function(x: X, by32: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (by32,), R.tuple(), R.str("f32"), ty_args=Y)
            R.output(y)
        return y

    alone = choose(tvm.IRModule({"one": function.without_attr("global_symbol")}))
    both = choose(tvm.IRModule(dict.fromkeys(("one", "two"), function.without_attr("global_symbol"))))
    for name in ("one", "two"):
        tvm.ir.assert_structural_equal(both[name], alone["one"])


def test_a_group_of_unlike_weights_reads_several_forms() -> None:
    @R.function
    def before(x: X, by256: W, plain: W, by32: W, also32: W, bias: R.Tensor((6,), "float32")):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (by256, plain, by32, also32),
                                   (bias, bias, bias, bias), R.str("f32"), ty_args=R.Tensor((4, 24), "float32"))
            R.output(y)
        return y

    @R.function
    def after(x: X, by256: W, plain: W, by32: W, also32: W, bias: R.Tensor((6,), "float32")):
        with R.dataflow():
            x256 = R.call_pure_packed("dflashc.quantise", x, R.str("q8_256"), ty_args=Q256)
            x32 = R.call_pure_packed("dflashc.quantise", x, R.str("q8_32"), ty_args=Q32)
            y = R.call_pure_packed("dflashc.linear_group", (x256, x, x32), (by256, plain, by32, also32),
                                   (bias, bias, bias, bias), R.str("q8_256,f32,q8_32"),
                                   ty_args=R.Tensor((4, 24), "float32"))
            R.output(y)
        return y

    assert_rewrites(choose, before, after)


def test_gated_units_and_heads() -> None:
    @R.function
    def before(x: X, by256: W, by32: W, also32: W):
        with R.dataflow():
            u = R.call_pure_packed("dflashc.gated_linear", x, by32, also32, R.str("silu"), R.str("f32"), R.str("f32"),
                                   ty_args=Y)
            ids = R.call_pure_packed("dflashc.linear_argmax", x, by256, R.tuple(), R.str("f32"), ty_args=IDS)
            result = (u, ids)
            R.output(result)
        return result

    @R.function
    def after(x: X, by256: W, by32: W, also32: W):
        with R.dataflow():
            x32 = R.call_pure_packed("dflashc.quantise", x, R.str("q8_32"), ty_args=Q32)
            u = R.call_pure_packed("dflashc.gated_linear", x32, by32, also32, R.str("silu"), R.str("q8_32"),
                                   R.str("f32"), ty_args=Y)
            x256 = R.call_pure_packed("dflashc.quantise", x, R.str("q8_256"), ty_args=Q256)
            ids = R.call_pure_packed("dflashc.linear_argmax", x256, by256, R.tuple(), R.str("q8_256"), ty_args=IDS)
            result = (u, ids)
            R.output(result)
        return result

    assert_rewrites(choose, before, after)


def test_plain_weights_keep_the_graph() -> None:
    @R.function
    def function(x: X, plain: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (plain,), R.tuple(), R.str("f32"), ty_args=Y)
            ids = R.call_pure_packed("dflashc.linear_argmax", x, plain, R.tuple(), R.str("f32"), ty_args=IDS)
            u = R.call_pure_packed("dflashc.gated_linear", x, plain, plain, R.str("silu"), R.str("f32"), R.str("f32"),
                                   ty_args=Y)
            result = (y, ids, u)
            R.output(result)
        return result

    assert_keeps(choose, function)
