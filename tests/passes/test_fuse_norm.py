"""FuseNorm: residual add, norms and quantisation in one call, whatever else reads their parts."""
# mypy: disable-error-code="valid-type"

from tvm.script import relax as R
from tvm.script import tirx as T

from dflashc.passes.fuse_norm import fuse_norm
from tests.passes.compare import assert_keeps, assert_rewrites

X, W = R.Tensor((4, 256), "float32"), R.Tensor((256,), "float32")
D, BASE = R.Tensor((4, 32), "float32"), R.Tensor((2, 2, 256), "float32")
Q32 = R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 8), "float32"), R.Tensor((4, 8), "int32"))
Q256 = R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 1), "float32"), R.Tensor((4, 16), "int16"))
X_ALONE, X_X, X_Q32 = R.Tuple(X), R.Tuple(X, X), R.Tuple(X, Q32)


def test_a_norm_of_the_first_layer() -> None:
    @R.function
    def before(x: X, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.rms_norm", x, w, T.float64(1e-6), ty_args=X)
            q = R.call_pure_packed("dflashc.quantise", n, R.str("q8_32"), ty_args=Q32)
            R.output(q)
        return q

    @R.function
    def after(x: X, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, R.tuple(), R.tuple(), (w,), T.float64(1e-6), R.str("q8_32"),
                                   ty_args=X_Q32)
            q = n[1]
            R.output(q)
        return q

    assert_rewrites(fuse_norm, before, after)


def test_residual_add_norm_and_quantise() -> None:
    @R.function
    def before(x: X, delta: X, w: W):
        with R.dataflow():
            s = R.add(x, delta)
            n = R.call_pure_packed("dflashc.rms_norm", s, w, T.float64(1e-6), ty_args=X)
            q = R.call_pure_packed("dflashc.quantise", n, R.str("q8_32"), ty_args=Q32)
            result = (s, q)
            R.output(result)
        return result

    @R.function
    def after(x: X, delta: X, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, (delta,), R.tuple(), (w,), T.float64(1e-6), R.str("q8_32"),
                                   ty_args=X_Q32)
            s = n[0]
            q = n[1]
            result = (s, q)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_the_last_add_has_no_norm() -> None:
    @R.function
    def before(x: X, delta: X):
        with R.dataflow():
            s = R.add(x, delta)
            R.output(s)
        return s

    @R.function
    def after(x: X, delta: X):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, (delta,), R.tuple(), R.tuple(), T.float64(0.0), R.str(""),
                                   ty_args=X_ALONE)
            s = n[0]
            R.output(s)
        return s

    assert_rewrites(fuse_norm, before, after)


def test_a_norm_in_several_forms() -> None:
    @R.function
    def before(x: X, delta: X, w: W):
        with R.dataflow():
            s = R.add(x, delta)
            n = R.call_pure_packed("dflashc.rms_norm", s, w, T.float64(1e-6), ty_args=X)
            q32 = R.call_pure_packed("dflashc.quantise", n, R.str("q8_32"), ty_args=Q32)
            q256 = R.call_pure_packed("dflashc.quantise", n, R.str("q8_256"), ty_args=Q256)
            result = (q32, n, q256)
            R.output(result)
        return result

    @R.function
    def after(x: X, delta: X, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, (delta,), R.tuple(), (w,), T.float64(1e-6),
                                   R.str("q8_32,q8_256,f32"), ty_args=R.Tuple(X, Q32, Q256, X))
            q32 = n[1]
            q256 = n[2]
            plain = n[3]
            result = (q32, plain, q256)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_a_norm_that_is_the_result() -> None:
    @R.function
    def before(x: X, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.rms_norm", x, w, T.float64(1e-6), ty_args=X)
            R.output(n)
        return n

    @R.function
    def after(x: X, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, R.tuple(), R.tuple(), (w,), T.float64(1e-6), R.str("f32"),
                                   ty_args=X_X)
            plain = n[1]
            R.output(plain)
        return plain

    assert_rewrites(fuse_norm, before, after)


def test_norms_after_and_before_a_sublayer() -> None:
    @R.function
    def before(x: X, f: X, post: W, w: W):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.rms_norm", f, post, T.float64(1e-6), ty_args=X)
            s = R.add(x, p)
            n = R.call_pure_packed("dflashc.rms_norm", s, w, T.float64(1e-6), ty_args=X)
            result = (s, n)
            R.output(result)
        return result

    @R.function
    def after(x: X, f: X, post: W, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, (f,), (post,), (w,), T.float64(1e-6), R.str("f32"), ty_args=X_X)
            s = n[0]
            plain = n[1]
            result = (s, plain)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_the_last_norm_after_a_sublayer() -> None:
    @R.function
    def before(x: X, f: X, post: W):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.rms_norm", f, post, T.float64(1e-6), ty_args=X)
            s = R.add(x, p)
            R.output(s)
        return s

    @R.function
    def after(x: X, f: X, post: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, (f,), (post,), R.tuple(), T.float64(1e-6), R.str(""),
                                   ty_args=X_ALONE)
            s = n[0]
            R.output(s)
        return s

    assert_rewrites(fuse_norm, before, after)


def test_a_norm_that_is_added_and_read_is_no_post_norm() -> None:
    @R.function
    def before(x: X, f: X, post: W):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.rms_norm", f, post, T.float64(1e-6), ty_args=X)
            s = R.add(x, p)
            result = (s, p)
            R.output(result)
        return result

    @R.function
    def after(x: X, f: X, post: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", f, R.tuple(), R.tuple(), (post,), T.float64(1e-6), R.str("f32"),
                                   ty_args=X_X)
            p = n[1]
            m = R.call_pure_packed("dflashc.norm", x, (p,), R.tuple(), R.tuple(), T.float64(0.0), R.str(""),
                                   ty_args=X_ALONE)
            s = m[0]
            result = (s, p)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_norms_of_unlike_epsilon_stay_apart() -> None:
    @R.function
    def before(x: X, f: X, post: W, w: W):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.rms_norm", f, post, T.float64(1e-5), ty_args=X)
            s = R.add(x, p)
            n = R.call_pure_packed("dflashc.rms_norm", s, w, T.float64(1e-6), ty_args=X)
            result = (s, n)
            R.output(result)
        return result

    @R.function
    def after(x: X, f: X, post: W, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, (f,), (post,), R.tuple(), T.float64(1e-5), R.str(""),
                                   ty_args=X_ALONE)
            s = n[0]
            m = R.call_pure_packed("dflashc.norm", s, R.tuple(), R.tuple(), (w,), T.float64(1e-6), R.str("f32"),
                                   ty_args=X_X)
            plain = m[1]
            result = (s, plain)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_two_norms_of_one_sum() -> None:
    @R.function
    def before(x: X, delta: X, a: W, b: W):
        with R.dataflow():
            s = R.add(x, delta)
            n = R.call_pure_packed("dflashc.rms_norm", s, a, T.float64(1e-6), ty_args=X)
            m = R.call_pure_packed("dflashc.rms_norm", s, b, T.float64(1e-6), ty_args=X)
            result = (n, m)
            R.output(result)
        return result

    @R.function
    def after(x: X, delta: X, a: W, b: W):
        with R.dataflow():
            p = R.call_pure_packed("dflashc.norm", x, (delta,), R.tuple(), (a,), T.float64(1e-6), R.str("f32"),
                                   ty_args=X_X)
            s = p[0]
            n = p[1]
            q = R.call_pure_packed("dflashc.norm", s, R.tuple(), R.tuple(), (b,), T.float64(1e-6), R.str("f32"),
                                   ty_args=X_X)
            m = q[1]
            result = (n, m)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_head_norms_and_loose_biases_keep_the_graph() -> None:
    @R.function
    def function(q: R.Tensor((4, 2, 8), "float32"), w: R.Tensor((8,), "float32"), y: X, bias: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.rms_norm", q, w, T.float64(1e-6), ty_args=R.Tensor((4, 2, 8), "float32"))
            biased = R.add(y, bias)
            turned = R.add(bias, y)
            heads = R.add(n, n)
            result = (heads, biased, turned)
            R.output(result)
        return result

    assert_keeps(fuse_norm, function)


def test_fused_norms_are_left_alone() -> None:
    @R.function
    def function(x: X, delta: X, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm", x, (delta,), R.tuple(), (w,), T.float64(1e-6), R.str("f32"),
                                   ty_args=X_X)
            s = n[0]
            plain = n[1]
            result = (s, plain)
            R.output(result)
        return result

    assert_keeps(fuse_norm, function)


def test_a_convolution_joins_the_residual_add() -> None:
    @R.function
    def before(x: X, z: X, dynamic: D, base: BASE, w: W):
        with R.dataflow():
            delta = R.call_pure_packed("dflashc.convolution_out", z, dynamic, base, ty_args=X)
            s = R.add(x, delta)
            n = R.call_pure_packed("dflashc.rms_norm", s, w, T.float64(1e-6), ty_args=X)
            q = R.call_pure_packed("dflashc.quantise", n, R.str("q8_32"), ty_args=Q32)
            result = (s, q, n)
            R.output(result)
        return result

    @R.function
    def after(x: X, z: X, dynamic: D, base: BASE, w: W):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm_convolution", x, z, dynamic, base, (w,), T.float64(1e-6),
                                   R.str("q8_32,f32"), ty_args=R.Tuple(X, Q32, X))
            s = n[0]
            q = n[1]
            plain = n[2]
            result = (s, q, plain)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_a_convolution_before_the_last_add() -> None:
    @R.function
    def before(x: X, z: X, dynamic: D, base: BASE):
        with R.dataflow():
            delta = R.call_pure_packed("dflashc.convolution_out", z, dynamic, base, ty_args=X)
            s = R.add(x, delta)
            R.output(s)
        return s

    @R.function
    def after(x: X, z: X, dynamic: D, base: BASE):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.norm_convolution", x, z, dynamic, base, R.tuple(), T.float64(0.0),
                                   R.str(""), ty_args=X_ALONE)
            s = n[0]
            R.output(s)
        return s

    assert_rewrites(fuse_norm, before, after)


def test_a_convolution_that_something_else_reads_stays() -> None:
    @R.function
    def before(x: X, z: X, dynamic: D, base: BASE):
        with R.dataflow():
            delta = R.call_pure_packed("dflashc.convolution_out", z, dynamic, base, ty_args=X)
            s = R.add(x, delta)
            result = (s, delta)
            R.output(result)
        return result

    @R.function
    def after(x: X, z: X, dynamic: D, base: BASE):
        with R.dataflow():
            delta = R.call_pure_packed("dflashc.convolution_out", z, dynamic, base, ty_args=X)
            n = R.call_pure_packed("dflashc.norm", x, (delta,), R.tuple(), R.tuple(), T.float64(0.0), R.str(""),
                                   ty_args=X_ALONE)
            s = n[0]
            result = (s, delta)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_a_norm_between_convolution_and_add_stays_between_them() -> None:
    @R.function
    def before(x: X, z: X, dynamic: D, base: BASE, post: W, w: W):
        with R.dataflow():
            c = R.call_pure_packed("dflashc.convolution_out", z, dynamic, base, ty_args=X)
            delta = R.call_pure_packed("dflashc.rms_norm", c, post, T.float64(1e-6), ty_args=X)
            s = R.add(x, delta)
            n = R.call_pure_packed("dflashc.rms_norm", s, w, T.float64(1e-6), ty_args=X)
            result = (s, n)
            R.output(result)
        return result

    @R.function
    def after(x: X, z: X, dynamic: D, base: BASE, post: W, w: W):
        with R.dataflow():
            c = R.call_pure_packed("dflashc.convolution_out", z, dynamic, base, ty_args=X)
            n = R.call_pure_packed("dflashc.norm", x, (c,), (post,), (w,), T.float64(1e-6), R.str("f32"), ty_args=X_X)
            s = n[0]
            plain = n[1]
            result = (s, plain)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)


def test_a_convolution_with_norms_of_two_epsilons_takes_in_the_first() -> None:
    @R.function
    def before(x: X, z: X, dynamic: D, base: BASE, w: W):
        with R.dataflow():
            delta = R.call_pure_packed("dflashc.convolution_out", z, dynamic, base, ty_args=X)
            s = R.add(x, delta)
            n = R.call_pure_packed("dflashc.rms_norm", s, w, T.float64(1e-6), ty_args=X)
            other = R.call_pure_packed("dflashc.rms_norm", s, w, T.float64(1e-5), ty_args=X)
            result = (n, other)
            R.output(result)
        return result

    @R.function
    def after(x: X, z: X, dynamic: D, base: BASE, w: W):
        with R.dataflow():
            c = R.call_pure_packed("dflashc.norm_convolution", x, z, dynamic, base, (w,), T.float64(1e-6),
                                   R.str("f32"), ty_args=X_X)
            s = c[0]
            n = c[1]
            second = R.call_pure_packed("dflashc.norm", s, R.tuple(), R.tuple(), (w,), T.float64(1e-5), R.str("f32"),
                                        ty_args=X_X)
            other = second[1]
            result = (n, other)
            R.output(result)
        return result

    assert_rewrites(fuse_norm, before, after)
