"""SeparateProjections: merged linears whose parts nothing has fused become linears of their own again."""
# mypy: disable-error-code="valid-type"

from tvm.script import relax as R

from dflashc.passes.separate_projections import separate_projections
from tests.passes.compare import assert_keeps, assert_rewrites

X, A, B, A_BIAS, B_BIAS = (R.Tensor(shape, "float32") for shape in ((4, 8), (16, 8), (24, 8), (16,), (24,)))
BOTH, A_OUT, B_OUT = R.Tensor((4, 40), "float32"), R.Tensor((4, 16), "float32"), R.Tensor((4, 24), "float32")


def test_parts_become_linears() -> None:
    @R.function
    def before(x: X, a: A, b: B):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (a, b), R.tuple(), R.str("f32"), ty_args=BOTH)
            parts = R.split(y, [16], axis=-1)
            p = parts[0]
            q = parts[1]
            result = (q, p)
            R.output(result)
        return result

    @R.function
    def after(x: X, a: A, b: B):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.linear_group", (x,), (a,), R.tuple(), R.str("f32"), ty_args=A_OUT)
            q = R.call_pure_packed("dflashc.linear_group", (x,), (b,), R.tuple(), R.str("f32"), ty_args=B_OUT)
            result = (q, p)
            R.output(result)
        return result

    assert_rewrites(separate_projections, before, after)


def test_each_keeps_its_bias_and_an_unused_one_goes() -> None:
    @R.function
    def before(x: X, a: A, b: B, a_bias: A_BIAS, b_bias: B_BIAS):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (a, b), (a_bias, b_bias), R.str("f32"), ty_args=BOTH)
            parts = R.split(y, [16], axis=-1)
            q = parts[1]
            z = R.nn.silu(q)
            R.output(z)
        return z

    @R.function
    def after(x: X, a: A, b: B, a_bias: A_BIAS, b_bias: B_BIAS):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.linear_group", (x,), (b,), (b_bias,), R.str("f32"), ty_args=B_OUT)
            z = R.nn.silu(q)
            R.output(z)
        return z

    assert_rewrites(separate_projections, before, after)


def test_a_merged_output_that_is_read_whole_keeps_the_graph() -> None:
    @R.function
    def function(x: X, a: A, b: B):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (a, b), R.tuple(), R.str("f32"), ty_args=BOTH)
            z = R.nn.silu(y)
            R.output(z)
        return z

    assert_keeps(separate_projections, function)


def test_parts_that_are_returned_together_keep_the_graph() -> None:
    @R.function
    def function(x: X, a: A, b: B):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (a, b), R.tuple(), R.str("f32"), ty_args=BOTH)
            parts = R.split(y, [16], axis=-1)
            R.output(parts)
        return parts

    assert_keeps(separate_projections, function)


def test_a_split_that_does_not_follow_the_weights_keeps_the_graph() -> None:
    @R.function
    def function(x: X, a: A, b: B):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (a, b), R.tuple(), R.str("f32"), ty_args=BOTH)
            parts = R.split(y, [24], axis=-1)
            p = parts[0]
            q = parts[1]
            result = (p, q)
            R.output(result)
        return result

    assert_keeps(separate_projections, function)


def test_halves_of_one_weight_keep_the_graph() -> None:
    @R.function
    def function(x: X, b: B):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (b,), R.tuple(), R.str("f32"), ty_args=B_OUT)
            parts = R.split(y, 2, axis=-1)
            p = parts[0]
            q = parts[1]
            z = R.multiply(p, q)
            R.output(z)
        return z

    assert_keeps(separate_projections, function)
