"""FuseGatedUnit: one call for gate, up, activation and product; the merged projection stays for unlike formats."""
# mypy: disable-error-code="valid-type"

import tvm
from tvm.script import relax as R

from dflashc.passes.fuse_gated_unit import fuse_gated_unit
from tests.passes.compare import assert_keeps, assert_rewrites

X, W, B = R.Tensor((4, 8), "float32"), R.Tensor((6, 8), "float32"), R.Tensor((6,), "float32")
F, F2, F3 = R.Tensor((4, 6), "float32"), R.Tensor((4, 12), "float32"), R.Tensor((4, 18), "float32")


def alike(module: tvm.IRModule) -> tvm.IRModule:
    return fuse_gated_unit(module, {"gate": "q4_k", "up": "q4_k"})


def unlike(module: tvm.IRModule) -> tvm.IRModule:
    return fuse_gated_unit(module, {"gate": "q4_k", "up": "q6_k"})


@R.function
def swiglu(x: X, gate: W, up: W):
    with R.dataflow():
        y = R.call_pure_packed("dflashc.linear_group", (x,), (gate, up), R.tuple(), R.str("f32"), ty_args=F2)
        parts = R.split(y, [6], axis=-1)
        activated = R.nn.silu(parts[0])
        result = R.multiply(activated, parts[1])
        R.output(result)
    return result


@R.function
def geglu_with_biases(x: X, gate: W, gate_bias: B, up: W, up_bias: B):
    with R.dataflow():
        y = R.call_pure_packed("dflashc.linear_group", (x,), (gate, up), (gate_bias, up_bias), R.str("f32"), ty_args=F2)
        parts = R.split(y, [6], axis=-1)
        activated = R.nn.gelu_tanh(parts[0])
        result = R.multiply(activated, parts[1])
        R.output(result)
    return result


def test_weights_of_one_format() -> None:
    @R.function
    def after(x: X, gate: W, up: W):
        with R.dataflow():
            result = R.call_pure_packed("dflashc.gated_linear", x, gate, up, R.str("silu"), R.str("f32"), R.str("f32"),
                                        ty_args=F)
            R.output(result)
        return result

    assert_rewrites(alike, swiglu, after)


def test_weights_of_unlike_formats() -> None:
    @R.function
    def after(x: X, gate: W, up: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (gate, up), R.tuple(), R.str("f32"), ty_args=F2)
            result = R.call_pure_packed("dflashc.gated", y, R.str("silu"), R.str("f32"), ty_args=F)
            R.output(result)
        return result

    assert_rewrites(unlike, swiglu, after)


def test_weights_with_biases() -> None:
    @R.function
    def after(x: X, gate: W, gate_bias: B, up: W, up_bias: B):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (gate, up), (gate_bias, up_bias), R.str("f32"),
                                   ty_args=F2)
            result = R.call_pure_packed("dflashc.gated", y, R.str("gelu_tanh"), R.str("f32"), ty_args=F)
            R.output(result)
        return result

    assert_rewrites(alike, geglu_with_biases, after)


def test_the_activation_of_the_second_half_keeps_the_graph() -> None:
    @R.function
    def function(x: X, gate: W, up: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (gate, up), R.tuple(), R.str("f32"), ty_args=F2)
            parts = R.split(y, [6], axis=-1)
            activated = R.nn.silu(parts[1])
            result = R.multiply(activated, parts[0])
            R.output(result)
        return result

    assert_keeps(alike, function)


def test_another_activation_keeps_the_graph() -> None:
    @R.function
    def function(x: X, gate: W, up: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (gate, up), R.tuple(), R.str("f32"), ty_args=F2)
            parts = R.split(y, [6], axis=-1)
            activated = R.nn.gelu(parts[0])
            result = R.multiply(activated, parts[1])
            R.output(result)
        return result

    assert_keeps(alike, function)


def test_halves_of_two_products_keep_the_graph() -> None:
    @R.function
    def function(x: X, z: X, gate: W, up: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (gate, up), R.tuple(), R.str("f32"), ty_args=F2)
            y_parts = R.split(y, [6], axis=-1)
            u = R.call_pure_packed("dflashc.linear_group", (z,), (gate, up), R.tuple(), R.str("f32"), ty_args=F2)
            u_parts = R.split(u, [6], axis=-1)
            activated = R.nn.silu(y_parts[0])
            result = R.multiply(activated, u_parts[1])
            R.output(result)
        return result

    assert_keeps(alike, function)


def test_a_third_projection_of_the_same_input_keeps_the_graph() -> None:
    @R.function
    def function(x: X, gate: W, up: W, other: W):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (gate, up, other), R.tuple(), R.str("f32"), ty_args=F3)
            parts = R.split(y, [6, 12], axis=-1)
            activated = R.nn.silu(parts[0])
            product = R.multiply(activated, parts[1])
            result = (product, parts[2])
            R.output(result)
        return result

    assert_keeps(alike, function)
    assert_keeps(unlike, function)


def test_halves_of_something_else_keep_the_graph() -> None:
    @R.function
    def function(y: F2):
        with R.dataflow():
            parts = R.split(y, [6], axis=-1)
            activated = R.nn.silu(parts[0])
            result = R.multiply(activated, parts[1])
            R.output(result)
        return result

    assert_keeps(alike, function)
