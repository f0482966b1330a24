"""FuseArgmax: the head and its arg-max in one call."""
# mypy: disable-error-code="valid-type"

from tvm.script import relax as R
from tvm.script import tirx as T

from dflashc.passes.fuse_argmax import fuse_argmax
from tests.passes.compare import assert_keeps, assert_rewrites

X, W, B = R.Tensor((4, 8), "float32"), R.Tensor((10, 8), "float32"), R.Tensor((10,), "float32")
LOGITS, LOGITS2, IDS = R.Tensor((4, 10), "float32"), R.Tensor((4, 20), "float32"), R.Tensor((4,), "int32")
D2T = R.Tensor((10,), "int32")


@R.function
def fused(x: X, head: W):
    with R.dataflow():
        ids = R.call_pure_packed("dflashc.linear_argmax", x, head, R.tuple(), R.str("f32"), ty_args=IDS)
        R.output(ids)
    return ids


def test_head_and_argmax() -> None:
    @R.function
    def before(x: X, head: W):
        with R.dataflow():
            logits = R.call_pure_packed("dflashc.linear_group", (x,), (head,), R.tuple(), R.str("f32"), ty_args=LOGITS)
            ids = R.call_pure_packed("dflashc.argmax", logits, ty_args=IDS)
            R.output(ids)
        return ids

    assert_rewrites(fuse_argmax, before, fused)


def test_a_softcap_in_between_is_dropped() -> None:
    @R.function
    def before(x: X, head: W):
        with R.dataflow():
            logits = R.call_pure_packed("dflashc.linear_group", (x,), (head,), R.tuple(), R.str("f32"), ty_args=LOGITS)
            capped = R.call_pure_packed("dflashc.softcap", logits, T.float64(30.0), ty_args=LOGITS)
            ids = R.call_pure_packed("dflashc.argmax", capped, ty_args=IDS)
            R.output(ids)
        return ids

    assert_rewrites(fuse_argmax, before, fused)


def test_logits_that_are_read_elsewhere_stay() -> None:
    @R.function
    def before(x: X, head: W):
        with R.dataflow():
            logits = R.call_pure_packed("dflashc.linear_group", (x,), (head,), R.tuple(), R.str("f32"), ty_args=LOGITS)
            capped = R.call_pure_packed("dflashc.softcap", logits, T.float64(30.0), ty_args=LOGITS)
            ids = R.call_pure_packed("dflashc.argmax", capped, ty_args=IDS)
            result = (capped, ids)
            R.output(result)
        return result

    @R.function
    def after(x: X, head: W):
        with R.dataflow():
            logits = R.call_pure_packed("dflashc.linear_group", (x,), (head,), R.tuple(), R.str("f32"), ty_args=LOGITS)
            capped = R.call_pure_packed("dflashc.softcap", logits, T.float64(30.0), ty_args=LOGITS)
            ids = R.call_pure_packed("dflashc.linear_argmax", x, head, R.tuple(), R.str("f32"), ty_args=IDS)
            result = (capped, ids)
            R.output(result)
        return result

    assert_rewrites(fuse_argmax, before, after)


def test_a_reduced_vocabulary_is_looked_up_on_the_way() -> None:
    @R.function
    def before(x: X, head: W, d2t: D2T):
        with R.dataflow():
            logits = R.call_pure_packed("dflashc.linear_group", (x,), (head,), R.tuple(), R.str("f32"), ty_args=LOGITS)
            ids = R.call_pure_packed("dflashc.argmax", logits, ty_args=IDS)
            tokens = R.call_pure_packed("dflashc.look_up", ids, d2t, ty_args=IDS)
            R.output(tokens)
        return tokens

    @R.function
    def after(x: X, head: W, d2t: D2T):
        with R.dataflow():
            tokens = R.call_pure_packed("dflashc.linear_argmax", x, head, (d2t,), R.str("f32"), ty_args=IDS)
            R.output(tokens)
        return tokens

    assert_rewrites(fuse_argmax, before, after)


def test_an_argmax_that_is_read_elsewhere_is_looked_up_apart() -> None:
    @R.function
    def before(x: X, head: W, d2t: D2T):
        with R.dataflow():
            logits = R.call_pure_packed("dflashc.linear_group", (x,), (head,), R.tuple(), R.str("f32"), ty_args=LOGITS)
            ids = R.call_pure_packed("dflashc.argmax", logits, ty_args=IDS)
            tokens = R.call_pure_packed("dflashc.look_up", ids, d2t, ty_args=IDS)
            result = (ids, tokens)
            R.output(result)
        return result

    @R.function
    def after(x: X, head: W, d2t: D2T):
        with R.dataflow():
            ids = R.call_pure_packed("dflashc.linear_argmax", x, head, R.tuple(), R.str("f32"), ty_args=IDS)
            tokens = R.call_pure_packed("dflashc.look_up", ids, d2t, ty_args=IDS)
            result = (ids, tokens)
            R.output(result)
        return result

    assert_rewrites(fuse_argmax, before, after)


def test_a_bias_keeps_the_graph() -> None:
    @R.function
    def function(x: X, head: W, bias: B):
        with R.dataflow():
            logits = R.call_pure_packed("dflashc.linear_group", (x,), (head,), (bias,), R.str("f32"), ty_args=LOGITS)
            ids = R.call_pure_packed("dflashc.argmax", logits, ty_args=IDS)
            R.output(ids)
        return ids

    assert_keeps(fuse_argmax, function)


def test_several_weights_keep_the_graph() -> None:
    @R.function
    def function(x: X, a: W, b: W):
        with R.dataflow():
            logits = R.call_pure_packed("dflashc.linear_group", (x,), (a, b), R.tuple(), R.str("f32"), ty_args=LOGITS2)
            ids = R.call_pure_packed("dflashc.argmax", logits, ty_args=IDS)
            R.output(ids)
        return ids

    assert_keeps(fuse_argmax, function)


def test_logits_from_elsewhere_keep_the_graph() -> None:
    @R.function
    def function(logits: LOGITS):
        with R.dataflow():
            doubled = R.add(logits, logits)
            ids = R.call_pure_packed("dflashc.argmax", doubled, ty_args=IDS)
            R.output(ids)
        return ids

    assert_keeps(fuse_argmax, function)
