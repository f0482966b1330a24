"""FuseNorm: residual add, norms and quantisation in one call, whatever else reads their parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import relax as R

from dflashc.passes.fuse_norm import fuse_norm
from tests.passes.compare import assert_keeps, assert_rewrites

X, WEIGHT, HEADS = R.Tensor((4, 256), "float32"), R.Tensor((256,), "float32"), R.Tensor((4, 2, 8), "float32")
FORMS = {
    "f32": X,
    "q8_32": R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 8), "float32"), R.Tensor((4, 8), "int32")),
    "q8_256": R.Tuple(R.Tensor((4, 256), "int8"), R.Tensor((4, 1), "float32"), R.Tensor((4, 16), "int16")),
}
PARAMETERS = {
    **dict.fromkeys(("x", "delta", "y", "z"), X), **dict.fromkeys(("w", "other", "post", "bias"), WEIGHT),
    "q": HEADS, "head": R.Tensor((8,), "float32"), "dynamic": R.Tensor((4, 32), "float32"),
    "base": R.Tensor((2, 2, 256), "float32"),
}


class Bindings:
    """A function being written, operator by operator as they are called, in the order of the calls."""

    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()

    def call(self, name: str, result: relax.Type, *arguments: Any) -> Any:
        operands = [tirx.const(a, "float64") if isinstance(a, float) else tvm.ir.StringImm(a) if isinstance(a, str)
                    else relax.Tuple(list(a)) if isinstance(a, tuple) else a for a in arguments]
        return self.builder.emit(relax.op.call_pure_packed(f"dflashc.{name}", *operands, ty_args=result))

    def add(self, x: Any, y: Any) -> Any:
        return self.builder.emit(relax.op.add(x, y))

    def rms(self, x: Any, weight: Any, epsilon: float = 1e-6) -> Any:
        return self.call("rms_norm", x.ty, x, weight, epsilon)

    def quantise(self, x: Any, form: str) -> Any:
        return self.call("quantise", FORMS[form], x, form)

    def convolution(self, z: Any, dynamic: Any, base: Any) -> Any:
        return self.call("convolution_out", X, z, dynamic, base)

    def norm(self, x: Any, delta: tuple, post: tuple, weight: tuple, forms: str, epsilon: float = 1e-6) -> Any:
        return self.call("norm", self._parts(forms), x, delta, post, weight, epsilon, forms)

    def norm_convolution(self, x: Any, z: Any, dynamic: Any, base: Any, weight: tuple, forms: str,
                         epsilon: float = 1e-6) -> Any:
        return self.call("norm_convolution", self._parts(forms), x, z, dynamic, base, weight, epsilon, forms)

    def parts(self, value: Any, *indices: int) -> list[Any]:
        return [self.builder.emit(relax.TupleGetItem(value, index)) for index in indices]

    def _parts(self, forms: str) -> relax.Type:
        return R.Tuple(X, *(FORMS[form] for form in filter(None, forms.split(","))))


Body = Callable[..., Any]
"""body(bindings, parameters by their names in `PARAMETERS`) -> the result, or a list of results."""


def function(body: Body) -> relax.Function:
    b = Bindings()
    parameters = [relax.Var(name, PARAMETERS[name]) for name in list(inspect.signature(body).parameters)[1:]]
    with b.builder.function("main", parameters):
        with b.builder.dataflow():
            result = body(b, *parameters)
            output = b.builder.emit_output(relax.Tuple(result) if isinstance(result, list) else result)
        b.builder.emit_func_output(output)
    return b.builder.get()["main"]


def in_two_forms_and_plain(b: Bindings, x: Any, delta: Any, w: Any) -> list[Any]:
    n = b.rms(b.add(x, delta), w)
    q32, q256 = b.quantise(n, "q8_32"), b.quantise(n, "q8_256")
    return [q32, n, q256]


def in_three_forms(b: Bindings, x: Any, delta: Any, w: Any) -> list[Any]:
    q32, q256, plain = b.parts(b.norm(x, (delta,), (), (w,), "q8_32,q8_256,f32"), 1, 2, 3)
    return [q32, plain, q256]


def sum_and_norm(b: Bindings, x: Any, delta: Any, w: Any) -> list[Any]:
    total = b.add(x, delta)
    return [total, b.rms(total, w)]


def two_norms(b: Bindings, total: Any, first: Any, second: Any, epsilon: float = 1e-6) -> list[Any]:
    return [b.rms(total, first), b.rms(total, second, epsilon)]


def a_norm_of_the_sum(b: Bindings, first: Any, weight: Any, epsilon: float = 1e-6) -> list[Any]:
    """The norm in a fused call's sum, and one more norm of that sum."""
    total, normed = b.parts(first, 0, 1)
    return [normed, *b.parts(b.norm(total, (), (), (weight,), "f32", epsilon), 1)]


def convolution_read_twice(b: Bindings, x: Any, z: Any, dynamic: Any, base: Any) -> list[Any]:
    delta = b.convolution(z, dynamic, base)
    return [b.add(x, delta), delta]


def convolution_kept(b: Bindings, x: Any, z: Any, dynamic: Any, base: Any) -> list[Any]:
    delta = b.convolution(z, dynamic, base)
    return [*b.parts(b.norm(x, (delta,), (), (), "", 0.0), 0), delta]


def convolution_in_two_forms(b: Bindings, x: Any, z: Any, dynamic: Any, base: Any, w: Any) -> list[Any]:
    total = b.add(x, b.convolution(z, dynamic, base))
    n = b.rms(total, w)
    return [total, b.quantise(n, "q8_32"), n]


def post_norm_read_twice(b: Bindings, x: Any, y: Any, post: Any) -> list[Any]:
    p = b.rms(y, post)
    return [b.add(x, p), p]


def post_norm_apart(b: Bindings, x: Any, y: Any, post: Any) -> list[Any]:
    (p,) = b.parts(b.norm(y, (), (), (post,), "f32"), 1)
    return [*b.parts(b.norm(x, (p,), (), (), "", 0.0), 0), p]


def post_norm_of_another_epsilon(b: Bindings, x: Any, y: Any, post: Any, w: Any) -> list[Any]:
    (total,) = b.parts(b.norm(x, (y,), (post,), (), "", 1e-5), 0)
    return [total, *b.parts(b.norm(total, (), (), (w,), "f32"), 1)]


REWRITES: dict[str, tuple[Body, Body]] = {
    "a norm of the first layer": (
        lambda b, x, w: b.quantise(b.rms(x, w), "q8_32"),
        lambda b, x, w: b.parts(b.norm(x, (), (), (w,), "q8_32"), 1)[0]),
    "residual add, norm and quantise": (
        lambda b, x, delta, w: [s := b.add(x, delta), b.quantise(b.rms(s, w), "q8_32")],
        lambda b, x, delta, w: b.parts(b.norm(x, (delta,), (), (w,), "q8_32"), 0, 1)),
    "the last add has no norm": (
        lambda b, x, delta: b.add(x, delta),
        lambda b, x, delta: b.parts(b.norm(x, (delta,), (), (), "", 0.0), 0)[0]),
    "a norm in several forms": (in_two_forms_and_plain, in_three_forms),
    "a norm that is the result": (
        lambda b, x, w: b.rms(x, w),
        lambda b, x, w: b.parts(b.norm(x, (), (), (w,), "f32"), 1)[0]),
    "norms after and before a sublayer": (
        lambda b, x, y, post, w: sum_and_norm(b, x, b.rms(y, post), w),
        lambda b, x, y, post, w: b.parts(b.norm(x, (y,), (post,), (w,), "f32"), 0, 1)),
    "the last norm after a sublayer": (
        lambda b, x, y, post: b.add(x, b.rms(y, post)),
        lambda b, x, y, post: b.parts(b.norm(x, (y,), (post,), (), ""), 0)[0]),
    "a norm that is added and read is no post norm": (post_norm_read_twice, post_norm_apart),
    "norms of unlike epsilon stay apart": (
        lambda b, x, y, post, w: sum_and_norm(b, x, b.rms(y, post, 1e-5), w), post_norm_of_another_epsilon),
    "two norms of one sum": (
        lambda b, x, delta, w, other: two_norms(b, b.add(x, delta), w, other),
        lambda b, x, delta, w, other: a_norm_of_the_sum(b, b.norm(x, (delta,), (), (w,), "f32"), other)),
    "a convolution joins the residual add": (
        convolution_in_two_forms,
        lambda b, x, z, dynamic, base, w: b.parts(
            b.norm_convolution(x, z, dynamic, base, (w,), "q8_32,f32"), 0, 1, 2)),
    "a convolution before the last add": (
        lambda b, x, z, dynamic, base: b.add(x, b.convolution(z, dynamic, base)),
        lambda b, x, z, dynamic, base: b.parts(b.norm_convolution(x, z, dynamic, base, (), "", 0.0), 0)[0]),
    "a convolution that something else reads stays": (convolution_read_twice, convolution_kept),
    "a norm between convolution and add stays between them": (
        lambda b, x, z, dynamic, base, post, w: sum_and_norm(b, x, b.rms(b.convolution(z, dynamic, base), post), w),
        lambda b, x, z, dynamic, base, post, w: b.parts(
            b.norm(x, (b.convolution(z, dynamic, base),), (post,), (w,), "f32"), 0, 1)),
    "a convolution with norms of two epsilons takes in the first": (
        lambda b, x, z, dynamic, base, w: two_norms(b, b.add(x, b.convolution(z, dynamic, base)), w, w, 1e-5),
        lambda b, x, z, dynamic, base, w: a_norm_of_the_sum(
            b, b.norm_convolution(x, z, dynamic, base, (w,), "f32"), w, 1e-5)),
}


@pytest.mark.parametrize("name", REWRITES)
def test_rewrites(name: str) -> None:
    before, after = REWRITES[name]
    assert_rewrites(fuse_norm, function(before), function(after))


def head_norm_and_loose_biases(b: Bindings, q: Any, head: Any, y: Any, bias: Any) -> list[Any]:
    n = b.rms(q, head)
    biased, turned = b.add(y, bias), b.add(bias, y)
    return [b.add(n, n), biased, turned]


@pytest.mark.parametrize("body", [
    pytest.param(head_norm_and_loose_biases, id="head norms and loose biases"),
    pytest.param(lambda b, x, delta, w: b.parts(b.norm(x, (delta,), (), (w,), "f32"), 0, 1), id="fused norms"),
])
def test_keeps(body: Body) -> None:
    assert_keeps(fuse_norm, function(body))
