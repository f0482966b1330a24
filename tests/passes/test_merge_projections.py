"""MergeProjections: which linears become one, and where their biases go."""
# mypy: disable-error-code="valid-type"

from tvm.script import relax as R

from dflashc.passes.merge_projections import merge_projections
from tests.passes.compare import assert_keeps, assert_rewrites

X = R.Tensor((4, 8), "float32")
W2, B2, Y2 = R.Tensor((2, 8), "float32"), R.Tensor((2,), "float32"), R.Tensor((4, 2), "float32")
W6, B6, Y6 = R.Tensor((6, 8), "float32"), R.Tensor((6,), "float32"), R.Tensor((4, 6), "float32")
Y4, Y8, Y10 = R.Tensor((4, 4), "float32"), R.Tensor((4, 8), "float32"), R.Tensor((4, 10), "float32")


def test_linears_of_one_input_become_one() -> None:
    @R.function
    def before(x: X, wq: W6, wk: W2, wv: W2):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.linear", x, wq, ty_args=Y6)
            k = R.call_pure_packed("dflashc.linear", x, wk, ty_args=Y2)
            v = R.call_pure_packed("dflashc.linear", x, wv, ty_args=Y2)
            result = (q, k, v)
            R.output(result)
        return result

    @R.function
    def after(x: X, wq: W6, wk: W2, wv: W2):
        with R.dataflow():
            merged = R.call_pure_packed("dflashc.linear_group", (x,), (wq, wk, wv), R.tuple(), R.str("f32"),
                                        ty_args=Y10)
            parts = R.split(merged, [6, 8], axis=-1)
            q = parts[0]
            k = parts[1]
            v = parts[2]
            result = (q, k, v)
            R.output(result)
        return result

    assert_rewrites(merge_projections, before, after)


def test_biases_move_in() -> None:
    @R.function
    def before(x: X, wq: W6, bq: B6, wk: W2, bk: B2):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.linear", x, wq, ty_args=Y6)
            q_biased = R.add(q, bq)
            k = R.call_pure_packed("dflashc.linear", x, wk, ty_args=Y2)
            k_biased = R.add(k, bk)
            result = (q_biased, k_biased)
            R.output(result)
        return result

    @R.function
    def after(x: X, wq: W6, bq: B6, wk: W2, bk: B2):
        with R.dataflow():
            merged = R.call_pure_packed("dflashc.linear_group", (x,), (wq, wk), (bq, bk), R.str("f32"), ty_args=Y8)
            parts = R.split(merged, [6], axis=-1)
            q = parts[0]
            k = parts[1]
            result = (q, k)
            R.output(result)
        return result

    assert_rewrites(merge_projections, before, after)


def test_a_single_linear_becomes_a_group_of_one() -> None:
    @R.function
    def before(x: X, w: W6, b: B6):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear", x, w, ty_args=Y6)
            result = R.add(y, b)
            R.output(result)
        return result

    @R.function
    def after(x: X, w: W6, b: B6):
        with R.dataflow():
            result = R.call_pure_packed("dflashc.linear_group", (x,), (w,), (b,), R.str("f32"), ty_args=Y6)
            R.output(result)
        return result

    assert_rewrites(merge_projections, before, after)


def test_different_inputs_stay_apart() -> None:
    @R.function
    def before(x: X, z: X, a: W6, b: W6):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.linear", x, a, ty_args=Y6)
            q = R.call_pure_packed("dflashc.linear", z, b, ty_args=Y6)
            result = R.multiply(p, q)
            R.output(result)
        return result

    @R.function
    def after(x: X, z: X, a: W6, b: W6):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.linear_group", (x,), (a,), R.tuple(), R.str("f32"), ty_args=Y6)
            q = R.call_pure_packed("dflashc.linear_group", (z,), (b,), R.tuple(), R.str("f32"), ty_args=Y6)
            result = R.multiply(p, q)
            R.output(result)
        return result

    assert_rewrites(merge_projections, before, after)


def test_linears_with_and_without_bias_stay_apart() -> None:
    @R.function
    def before(x: X, wq: W6, bq: B6, wk: W2, wv: W2):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.linear", x, wq, ty_args=Y6)
            q_biased = R.add(q, bq)
            k = R.call_pure_packed("dflashc.linear", x, wk, ty_args=Y2)
            v = R.call_pure_packed("dflashc.linear", x, wv, ty_args=Y2)
            result = (q_biased, k, v)
            R.output(result)
        return result

    @R.function
    def after(x: X, wq: W6, bq: B6, wk: W2, wv: W2):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.linear_group", (x,), (wq,), (bq,), R.str("f32"), ty_args=Y6)
            merged = R.call_pure_packed("dflashc.linear_group", (x,), (wk, wv), R.tuple(), R.str("f32"), ty_args=Y4)
            parts = R.split(merged, [2], axis=-1)
            k = parts[0]
            v = parts[1]
            result = (q, k, v)
            R.output(result)
        return result

    assert_rewrites(merge_projections, before, after)


def test_a_bias_stays_out_where_the_plain_product_is_used_too() -> None:
    @R.function
    def before(x: X, w: W6, b: B6):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear", x, w, ty_args=Y6)
            biased = R.add(y, b)
            result = (y, biased)
            R.output(result)
        return result

    @R.function
    def after(x: X, w: W6, b: B6):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (w,), R.tuple(), R.str("f32"), ty_args=Y6)
            biased = R.add(y, b)
            result = (y, biased)
            R.output(result)
        return result

    assert_rewrites(merge_projections, before, after)


def test_only_parameters_and_vectors_are_biases() -> None:
    @R.function
    def before(x: X, w: W6, residual: Y6, b: B6):
        with R.dataflow():
            computed = R.multiply(b, b)
            p = R.call_pure_packed("dflashc.linear", x, w, ty_args=Y6)
            sum1 = R.add(p, residual)
            q = R.call_pure_packed("dflashc.linear", sum1, w, ty_args=Y6)
            sum2 = R.add(q, computed)
            R.output(sum2)
        return sum2

    @R.function
    def after(x: X, w: W6, residual: Y6, b: B6):
        with R.dataflow():
            computed = R.multiply(b, b)
            p = R.call_pure_packed("dflashc.linear_group", (x,), (w,), R.tuple(), R.str("f32"), ty_args=Y6)
            sum1 = R.add(p, residual)
            q = R.call_pure_packed("dflashc.linear_group", (sum1,), (w,), R.tuple(), R.str("f32"), ty_args=Y6)
            sum2 = R.add(q, computed)
            R.output(sum2)
        return sum2

    assert_rewrites(merge_projections, before, after)


def test_groups_are_left_alone() -> None:
    @R.function
    def merged(x: X, a: W6, b: W2):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (a, b), R.tuple(), R.str("f32"), ty_args=Y8)
            z = R.call_pure_packed("dflashc.linear_group", (x,), (a,), R.tuple(), R.str("f32"), ty_args=Y6)
            result = (y, z)
            R.output(result)
        return result

    assert_keeps(merge_projections, merged)
