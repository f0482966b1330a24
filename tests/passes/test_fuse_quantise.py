"""FuseQuantise: producers that hand over the form their only reader wants."""
# mypy: disable-error-code="valid-type"

from tvm.script import relax as R
from tvm.script import tirx as T

from dflashc.passes.fuse_quantise import fuse_quantise
from tests.passes.compare import assert_keeps, assert_rewrites

X, W, Y, Y2 = (R.Tensor(shape, "float32") for shape in ((4, 8), (256, 8), (4, 256), (4, 512)))
TABLE, CACHE, STATE = R.Tensor((2, 4, 32), "float32"), R.Tensor((2, 64, 64), "float16"), R.Tensor((8,), "int64")
Q32 = R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 8), "float32"), R.Tensor((4, 8), "int32"))
Q256 = R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 1), "float32"), R.Tensor((4, 16), "int16"))


def test_gated_linear() -> None:
    @R.function
    def before(x: X, gate: W, up: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.gated_linear", x, gate, up, R.str("silu"), R.str("f32"), R.str("f32"),
                                   ty_args=Y)
            q = R.call_pure_packed("dflashc.quantise", y, R.str("q8_256"), ty_args=Q256)
            R.output(q)
        return q

    @R.function
    def after(x: X, gate: W, up: W):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.gated_linear", x, gate, up, R.str("silu"), R.str("f32"), R.str("q8_256"),
                                   ty_args=Q256)
            R.output(q)
        return q

    assert_rewrites(fuse_quantise, before, after)


def test_gated() -> None:
    @R.function
    def before(y: Y2):
        with R.dataflow():
            z = R.call_pure_packed("dflashc.gated", y, R.str("gelu_tanh"), R.str("f32"), ty_args=Y)
            q = R.call_pure_packed("dflashc.quantise", z, R.str("q8_32"), ty_args=Q32)
            R.output(q)
        return q

    @R.function
    def after(y: Y2):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.gated", y, R.str("gelu_tanh"), R.str("q8_32"), ty_args=Q32)
            R.output(q)
        return q

    assert_rewrites(fuse_quantise, before, after)


def test_attention_block() -> None:
    @R.function
    def before(qkv: Y2, norm: R.Tensor((64,), "float32"), sinks: R.Tensor((4,), "float32"), table: TABLE,
               k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            o = R.call_pure_packed(
                "dflashc.attention_block", qkv, (norm, norm), (sinks,), table, k_cache, v_cache, state, T.int64(4),
                T.int64(2), T.int64(64), R.str("neox"), T.int64(16), T.float64(0.125), R.str("causal"), T.float64(1e-6),
                R.str("f32"), ty_args=Y)
            q = R.call_pure_packed("dflashc.quantise", o, R.str("q8_32"), ty_args=Q32)
            R.output(q)
        return q

    @R.function
    def after(qkv: Y2, norm: R.Tensor((64,), "float32"), sinks: R.Tensor((4,), "float32"), table: TABLE,
               k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            q = R.call_pure_packed(
                "dflashc.attention_block", qkv, (norm, norm), (sinks,), table, k_cache, v_cache, state, T.int64(4),
                T.int64(2), T.int64(64), R.str("neox"), T.int64(16), T.float64(0.125), R.str("causal"), T.float64(1e-6),
                R.str("q8_32"), ty_args=Q32)
            R.output(q)
        return q

    assert_rewrites(fuse_quantise, before, after)


def test_a_result_that_is_read_twice_stays_plain() -> None:
    @R.function
    def two_forms(y: Y2):
        with R.dataflow():
            z = R.call_pure_packed("dflashc.gated", y, R.str("silu"), R.str("f32"), ty_args=Y)
            q32 = R.call_pure_packed("dflashc.quantise", z, R.str("q8_32"), ty_args=Q32)
            q256 = R.call_pure_packed("dflashc.quantise", z, R.str("q8_256"), ty_args=Q256)
            result = (q32, q256)
            R.output(result)
        return result

    @R.function
    def returned_too(y: Y2):
        with R.dataflow():
            z = R.call_pure_packed("dflashc.gated", y, R.str("silu"), R.str("f32"), ty_args=Y)
            q32 = R.call_pure_packed("dflashc.quantise", z, R.str("q8_32"), ty_args=Q32)
            result = (z, q32)
            R.output(result)
        return result

    assert_keeps(fuse_quantise, two_forms)
    assert_keeps(fuse_quantise, returned_too)


def test_other_producers_and_other_readers_keep_the_graph() -> None:
    @R.function
    def function(x: Y, y: Y2, weight: R.Tensor((256,), "float32")):
        with R.dataflow():
            n = R.call_pure_packed("dflashc.rms_norm", x, weight, T.float64(1e-6), ty_args=Y)
            q = R.call_pure_packed("dflashc.quantise", n, R.str("q8_32"), ty_args=Q32)
            z = R.call_pure_packed("dflashc.gated", y, R.str("silu"), R.str("f32"), ty_args=Y)
            s = R.add(z, x)
            result = (q, s)
            R.output(result)
        return result

    assert_keeps(fuse_quantise, function)
