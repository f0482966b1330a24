"""FuseDenoiseBlock: DFlash2's two convolutions around a sublayer, and the graphs it must leave as they are."""
# mypy: disable-error-code="valid-type"

import pytest
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

from dflashc.passes.fuse_denoise_block import fuse_denoise_block
from tests.passes.compare import assert_keeps, assert_rewrites

# Two taps, 16 groups of 16 channels.
X, P, BASE, BIAS = (R.Tensor(shape, "float32") for shape in ((4, 256), (64, 256), (2, 2, 256), (64,)))
D, HALF, TWICE = R.Tensor((4, 64), "float32"), R.Tensor((4, 32), "float32"), R.Tensor((4, 128), "float32")
Q32 = R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 8), "float32"), R.Tensor((4, 8), "int32"))
Q256 = R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 1), "float32"), R.Tensor((4, 16), "int16"))


def sublayer(projected: str = "u", sides: tuple[int, int] = (0, 1)) -> relax.Function:
    """silu between two convolutions; `projected` names what the dynamic weights are made of."""
    before_side, after_side = sides
    index = 0 if projected == "u" else 1

    @R.function
    def function(u: X, other: X, p: P, base: BASE):
        with R.dataflow():
            d = R.call_pure_packed("dflashc.linear_group", ([u, other][index],), (p,), R.tuple(), R.str("f32"),
                                   ty_args=D)
            y = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(before_side), ty_args=X)
            z = R.nn.silu(y)
            result = R.call_pure_packed("dflashc.local_convolution", z, d, base, T.int64(after_side), ty_args=X)
            R.output(result)
        return result

    return function


def test_plain_forms() -> None:
    @R.function
    def after(u: X, other: X, p: P, base: BASE):
        with R.dataflow():
            c = R.call_pure_packed("dflashc.convolution_linear", u, u, p, base, R.str("f32"), R.str("f32"),
                                   ty_args=R.Tuple(X, HALF))
            y = c[0]
            d = c[1]
            z = R.nn.silu(y)
            result = R.call_pure_packed("dflashc.convolution_out", z, d, base, ty_args=X)
            R.output(result)
        return result

    assert_rewrites(fuse_denoise_block, sublayer(), after)


def test_quantised_input_and_result() -> None:
    @R.function
    def before(u: X, p: P, w: R.Tensor((256, 256), "float32"), base: BASE):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.quantise", u, R.str("q8_32"), ty_args=Q32)
            d = R.call_pure_packed("dflashc.linear_group", (q,), (p,), R.tuple(), R.str("q8_32"), ty_args=D)
            y = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(0), ty_args=X)
            y1 = R.call_pure_packed("dflashc.quantise", y, R.str("q8_256"), ty_args=Q256)
            z = R.call_pure_packed("dflashc.linear_group", (y1,), (w,), R.tuple(), R.str("q8_256"), ty_args=X)
            result = R.call_pure_packed("dflashc.local_convolution", z, d, base, T.int64(1), ty_args=X)
            R.output(result)
        return result

    @R.function
    def after(u: X, p: P, w: R.Tensor((256, 256), "float32"), base: BASE):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.quantise", u, R.str("q8_32"), ty_args=Q32)
            c = R.call_pure_packed("dflashc.convolution_linear", u, q, p, base, R.str("q8_32"), R.str("q8_256"),
                                   ty_args=R.Tuple(Q256, HALF))
            y1 = c[0]
            d = c[1]
            z = R.call_pure_packed("dflashc.linear_group", (y1,), (w,), R.tuple(), R.str("q8_256"), ty_args=X)
            result = R.call_pure_packed("dflashc.convolution_out", z, d, base, ty_args=X)
            R.output(result)
        return result

    assert_rewrites(fuse_denoise_block, before, after)


def test_a_result_in_two_forms_stays_plain() -> None:
    @R.function
    def before(u: X, p: P, base: BASE):
        with R.dataflow():
            d = R.call_pure_packed("dflashc.linear_group", (u,), (p,), R.tuple(), R.str("f32"), ty_args=D)
            y = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(0), ty_args=X)
            q32 = R.call_pure_packed("dflashc.quantise", y, R.str("q8_32"), ty_args=Q32)
            q256 = R.call_pure_packed("dflashc.quantise", y, R.str("q8_256"), ty_args=Q256)
            z = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(1), ty_args=X)
            result = (q32, q256, z)
            R.output(result)
        return result

    @R.function
    def after(u: X, p: P, base: BASE):
        with R.dataflow():
            c = R.call_pure_packed("dflashc.convolution_linear", u, u, p, base, R.str("f32"), R.str("f32"),
                                   ty_args=R.Tuple(X, HALF))
            y = c[0]
            d = c[1]
            q32 = R.call_pure_packed("dflashc.quantise", y, R.str("q8_32"), ty_args=Q32)
            q256 = R.call_pure_packed("dflashc.quantise", y, R.str("q8_256"), ty_args=Q256)
            z = R.call_pure_packed("dflashc.convolution_out", u, d, base, ty_args=X)
            result = (q32, q256, z)
            R.output(result)
        return result

    assert_rewrites(fuse_denoise_block, before, after)


def test_a_quantised_result_that_is_also_returned_stays_plain() -> None:
    @R.function
    def before(u: X, p: P, base: BASE):
        with R.dataflow():
            d = R.call_pure_packed("dflashc.linear_group", (u,), (p,), R.tuple(), R.str("f32"), ty_args=D)
            z = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(1), ty_args=X)
            y = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(0), ty_args=X)
            q = R.call_pure_packed("dflashc.quantise", y, R.str("q8_32"), ty_args=Q32)
            R.output(y, q, z)
        return (y, q, z)

    @R.function
    def after(u: X, p: P, base: BASE):
        with R.dataflow():
            c = R.call_pure_packed("dflashc.convolution_linear", u, u, p, base, R.str("f32"), R.str("f32"),
                                   ty_args=R.Tuple(X, HALF))
            y = c[0]
            d = c[1]
            z = R.call_pure_packed("dflashc.convolution_out", u, d, base, ty_args=X)
            q = R.call_pure_packed("dflashc.quantise", y, R.str("q8_32"), ty_args=Q32)
            result = (y, q, z)
            R.output(result)
        return result

    assert_rewrites(fuse_denoise_block, before, after)


@pytest.mark.parametrize("function", [
    pytest.param(sublayer("other"), id="weights of something else than is convolved"),
    pytest.param(sublayer(sides=(0, 0)), id="two convolutions before"),
    pytest.param(sublayer(sides=(1, 1)), id="two convolutions after"),
])
def test_other_convolutions_keep_the_graph(function: relax.Function) -> None:
    assert_keeps(fuse_denoise_block, function)


def test_a_bias_keeps_the_graph() -> None:
    @R.function
    def function(u: X, p: P, bias: BIAS, base: BASE):
        with R.dataflow():
            d = R.call_pure_packed("dflashc.linear_group", (u,), (p,), (bias,), R.str("f32"), ty_args=D)
            y = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(0), ty_args=X)
            z = R.call_pure_packed("dflashc.local_convolution", y, d, base, T.int64(1), ty_args=X)
            R.output(z)
        return z

    assert_keeps(fuse_denoise_block, function)


def test_a_projection_of_two_weights_keeps_the_graph() -> None:
    @R.function
    def function(u: X, p: P, base: R.Tensor((2, 4, 256), "float32")):
        with R.dataflow():
            d = R.call_pure_packed("dflashc.linear_group", (u,), (p, p), R.tuple(), R.str("f32"), ty_args=TWICE)
            y = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(0), ty_args=X)
            z = R.call_pure_packed("dflashc.local_convolution", y, d, base, T.int64(1), ty_args=X)
            R.output(z)
        return z

    assert_keeps(fuse_denoise_block, function)


def test_weights_that_something_else_reads_keep_the_graph() -> None:
    @R.function
    def function(u: X, p: P, base: BASE):
        with R.dataflow():
            d = R.call_pure_packed("dflashc.linear_group", (u,), (p,), R.tuple(), R.str("f32"), ty_args=D)
            y = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(0), ty_args=X)
            z = R.call_pure_packed("dflashc.local_convolution", y, d, base, T.int64(1), ty_args=X)
            result = (z, d)
            R.output(result)
        return result

    assert_keeps(fuse_denoise_block, function)


def test_weights_from_elsewhere_keep_the_graph() -> None:
    @R.function
    def function(u: X, d: D, base: BASE):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.local_convolution", u, d, base, T.int64(0), ty_args=X)
            z = R.call_pure_packed("dflashc.local_convolution", y, d, base, T.int64(1), ty_args=X)
            R.output(z)
        return z

    assert_keeps(fuse_denoise_block, function)
