"""FuseVerify: taps that leave the target in the form in which the drafter's fusion reads them."""
# mypy: disable-error-code="valid-type,attr-defined"

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from dflashc.passes.fuse_verify import fuse_verify
from dflashc.passes.rewriting import rewrite_module

X, WIDE, FUSION, OUT = (R.Tensor(shape, "float32") for shape in ((4, 32), (4, 64), (16, 64), (4, 16)))
Q32 = R.Tuple(R.Tensor((4, 64), "int8"), R.Tensor((4, 2), "float32"), R.Tensor((4, 2), "int32"))


@I.ir_module
class Target:
    @R.function
    def decode(x: X):
        with R.dataflow():
            first = R.nn.silu(x)
            second = R.nn.silu(first)
            third = R.nn.silu(second)
            result = (third, second, first)
            R.output(result)
        return result


@I.ir_module
class Quantised:
    @R.function
    def decode(x: X):
        with R.dataflow():
            first = R.nn.silu(x)
            second = R.nn.silu(first)
            third = R.nn.silu(second)
            result = (third, second, first)
            R.output(result)
        return result

    @R.function
    def inject(features: WIDE, fc: FUSION):
        with R.dataflow():
            q = R.call_pure_packed("dflashc.quantise", features, R.str("q8_32"), ty_args=Q32)
            y = R.call_pure_packed("dflashc.linear_group", (q,), (fc,), R.tuple(), R.str("q8_32"), ty_args=OUT)
            R.output(y)
        return y


@I.ir_module
class QuantisedAfter:
    @R.function
    def decode(x: X):
        with R.dataflow():
            first = R.nn.silu(x)
            second = R.nn.silu(first)
            third = R.nn.silu(second)
            f = R.call_pure_packed("dflashc.features", (second, first), R.str("q8_32"), ty_args=Q32)
            result = (third, f)
            R.output(result)
        return result

    @R.function
    def inject(features: Q32, fc: FUSION):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (features,), (fc,), R.tuple(), R.str("q8_32"), ty_args=OUT)
            R.output(y)
        return y


@I.ir_module
class Plain:
    @R.function
    def decode(x: X):
        with R.dataflow():
            first = R.nn.silu(x)
            second = R.nn.silu(first)
            result = (second, first)
            R.output(result)
        return result

    @R.function
    def inject(features: X, fc: R.Tensor((16, 32), "float32")):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (features,), (fc,), R.tuple(), R.str("f32"), ty_args=OUT)
            R.output(y)
        return y


@I.ir_module
class PlainAfter:
    @R.function
    def decode(x: X):
        with R.dataflow():
            first = R.nn.silu(x)
            second = R.nn.silu(first)
            f = R.call_pure_packed("dflashc.features", (first,), R.str("f32"), ty_args=X)
            result = (second, f)
            R.output(result)
        return result

    @R.function
    def inject(features: X, fc: R.Tensor((16, 32), "float32")):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (features,), (fc,), R.tuple(), R.str("f32"), ty_args=OUT)
            R.output(y)
        return y


@pytest.mark.parametrize(("before", "after"), [
    pytest.param(Quantised, QuantisedAfter, id="two taps, quantised"),
    pytest.param(Plain, PlainAfter, id="one tap, as it is"),
    pytest.param(Target, Target, id="no drafter"),
])
def test_features(before: tvm.IRModule, after: tvm.IRModule) -> None:
    canonical = relax.transform.CanonicalizeBindings()
    tvm.ir.assert_structural_equal(canonical(fuse_verify(before)), canonical(after))


def test_a_copy_that_renames_its_result_is_understood() -> None:
    canonical = relax.transform.CanonicalizeBindings()
    copied = rewrite_module(Quantised, lambda r, var, value: None)
    tvm.ir.assert_structural_equal(canonical(fuse_verify(copied)), canonical(QuantisedAfter))
