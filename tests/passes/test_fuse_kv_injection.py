"""FuseKVInjection: all cache writes of a drafter in one call, and the graphs it must leave as they are."""
# mypy: disable-error-code="valid-type"

import pytest
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

from dflashc.passes.fuse_kv_injection import fuse_kv_injection
from tests.passes.compare import assert_keeps, assert_rewrites

# One key-value head of 8.
X, W, B, HEAD = (R.Tensor(shape, "float32") for shape in ((4, 16), (8, 16), (8,), (8,)))
TABLE, CACHE, STATE = R.Tensor((2, 4, 4), "float32"), R.Tensor((1, 64, 8), "float16"), R.Tensor((8,), "int64")
TWO, FOUR, FLAT = R.Tensor((4, 16), "float32"), R.Tensor((4, 32), "float32"), R.Tensor((4, 8), "float32")
KV, TOKEN = R.Tensor((4, 1, 8), "float32"), R.Tensor((1,), "int64")


def one_layer(order: tuple[int, int] = (0, 1)) -> relax.Function:
    first, second = order

    @R.function
    def function(x: X, wk: W, wv: W, norm: HEAD, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (wk, wv), R.tuple(), R.str("f32"), ty_args=TWO)
            parts = R.split(y, [8], axis=-1)
            k = R.reshape(parts[first], (4, 1, 8))
            v = R.reshape(parts[second], (4, 1, 8))
            k1 = R.call_pure_packed("dflashc.rms_norm", k, norm, T.float64(1e-6), ty_args=KV)
            k2 = R.call_pure_packed("dflashc.rope", k1, table, R.str("neox"), ty_args=KV)
            t = R.call_pure_packed("dflashc.cache_write", k2, v, k_cache, v_cache, state, ty_args=TOKEN)
            result = (t,)
            R.output(result)
        return result

    return function


def two_layers(k_epsilon: float = 1e-6, pairing: str = "neox", other_table: bool = False,
               other_state: bool = False, swapped: bool = False) -> relax.Function:
    """Two layers whose second may differ in what the fused call has once."""
    table_index, state_index = int(other_table), int(other_state)
    k_index, v_index = (0, 1) if swapped else (2, 3)
    first_k, first_v = (2, 3) if swapped else (0, 1)

    @R.function
    def function(x: X, wk: W, wv: W, wk1: W, wv1: W, norm: HEAD, norm1: HEAD, table: TABLE, table1: TABLE, k0: CACHE,
                 v0: CACHE, k1: CACHE, v1: CACHE, state: STATE, state1: STATE):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (wk, wv, wk1, wv1), R.tuple(), R.str("f32"),
                                   ty_args=FOUR)
            parts = R.split(y, [8, 16, 24], axis=-1)
            a = R.reshape(parts[first_k], (4, 1, 8))
            b = R.reshape(parts[first_v], (4, 1, 8))
            a1 = R.call_pure_packed("dflashc.rms_norm", a, norm, T.float64(1e-6), ty_args=KV)
            a2 = R.call_pure_packed("dflashc.rope", a1, table, R.str("neox"), ty_args=KV)
            t0 = R.call_pure_packed("dflashc.cache_write", a2, b, k0, v0, state, ty_args=TOKEN)
            c = R.reshape(parts[k_index], (4, 1, 8))
            d = R.reshape(parts[v_index], (4, 1, 8))
            c1 = R.call_pure_packed("dflashc.rms_norm", c, norm1, T.float64(k_epsilon), ty_args=KV)
            c2 = R.call_pure_packed("dflashc.rope", c1, [table, table1][table_index], R.str(pairing), ty_args=KV)
            t1 = R.call_pure_packed("dflashc.cache_write", c2, d, k1, v1, [state, state1][state_index], ty_args=TOKEN)
            result = (t0, t1)
            R.output(result)
        return result

    return function


def test_one_layer() -> None:
    @R.function
    def after(x: X, wk: W, wv: W, norm: HEAD, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            t = R.call_pure_packed("dflashc.kv_injection", (x,), (wk, wv), R.tuple(), (norm,), table,
                                   (k_cache, v_cache), state, T.int64(1), T.int64(8), R.str("neox"), T.float64(1e-6),
                                   R.str("f32"), ty_args=TOKEN)
            result = (t,)
            R.output(result)
        return result

    assert_rewrites(fuse_kv_injection, one_layer(), after)


def test_two_layers() -> None:
    @R.function
    def after(x: X, wk: W, wv: W, wk1: W, wv1: W, norm: HEAD, norm1: HEAD, table: TABLE, table1: TABLE, k0: CACHE,
              v0: CACHE, k1: CACHE, v1: CACHE, state: STATE, state1: STATE):
        with R.dataflow():
            t = R.call_pure_packed("dflashc.kv_injection", (x,), (wk, wv, wk1, wv1), R.tuple(), (norm, norm1), table,
                                   (k0, v0, k1, v1), state, T.int64(1), T.int64(8), R.str("neox"), T.float64(1e-6),
                                   R.str("f32"), ty_args=TOKEN)
            result = (t, t)
            R.output(result)
        return result

    assert_rewrites(fuse_kv_injection, two_layers(), after)


@pytest.mark.parametrize("function", [
    pytest.param(one_layer((1, 0)), id="values before keys"),
    pytest.param(two_layers(k_epsilon=1e-5), id="another epsilon"),
    pytest.param(two_layers(pairing="norm"), id="another pairing"),
    pytest.param(two_layers(other_table=True), id="another rope table"),
    pytest.param(two_layers(other_state=True), id="other positions"),
    pytest.param(two_layers(swapped=True), id="layers in another order than their weights"),
])
def test_layers_that_are_not_one_injection_keep_the_graph(function: relax.Function) -> None:
    assert_keeps(fuse_kv_injection, function)


def test_biases_go_along() -> None:
    @R.function
    def before(x: X, wk: W, wv: W, bk: B, bv: B, norm: HEAD, table: TABLE, k_cache: CACHE, v_cache: CACHE,
               state: STATE):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (wk, wv), (bk, bv), R.str("f32"), ty_args=TWO)
            parts = R.split(y, [8], axis=-1)
            k = R.reshape(parts[0], (4, 1, 8))
            v = R.reshape(parts[1], (4, 1, 8))
            k1 = R.call_pure_packed("dflashc.rms_norm", k, norm, T.float64(1e-6), ty_args=KV)
            k2 = R.call_pure_packed("dflashc.rope", k1, table, R.str("neox"), ty_args=KV)
            t = R.call_pure_packed("dflashc.cache_write", k2, v, k_cache, v_cache, state, ty_args=TOKEN)
            R.output(t)
        return t

    @R.function
    def after(x: X, wk: W, wv: W, bk: B, bv: B, norm: HEAD, table: TABLE, k_cache: CACHE, v_cache: CACHE,
              state: STATE):
        with R.dataflow():
            t = R.call_pure_packed("dflashc.kv_injection", (x,), (wk, wv), (bk, bv), (norm,), table,
                                   (k_cache, v_cache), state, T.int64(1), T.int64(8), R.str("neox"), T.float64(1e-6),
                                   R.str("f32"), ty_args=TOKEN)
            R.output(t)
        return t

    assert_rewrites(fuse_kv_injection, before, after)


def test_a_write_whose_keys_come_from_elsewhere_keeps_all() -> None:
    @R.function
    def function(x: X, wk: W, wv: W, keys: KV, norm: HEAD, table: TABLE, k0: CACHE, v0: CACHE, k1: CACHE, v1: CACHE,
                 state: STATE):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (wk, wv), R.tuple(), R.str("f32"), ty_args=TWO)
            parts = R.split(y, [8], axis=-1)
            k = R.reshape(parts[0], (4, 1, 8))
            v = R.reshape(parts[1], (4, 1, 8))
            n = R.call_pure_packed("dflashc.rms_norm", k, norm, T.float64(1e-6), ty_args=KV)
            r = R.call_pure_packed("dflashc.rope", n, table, R.str("neox"), ty_args=KV)
            t0 = R.call_pure_packed("dflashc.cache_write", r, v, k0, v0, state, ty_args=TOKEN)
            t1 = R.call_pure_packed("dflashc.cache_write", keys, v, k1, v1, state, ty_args=TOKEN)
            result = (t0, t1)
            R.output(result)
        return result

    assert_keeps(fuse_kv_injection, function)


def test_keys_without_a_norm_keep_the_graph() -> None:
    @R.function
    def function(x: X, wk: W, wv: W, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            y = R.call_pure_packed("dflashc.linear_group", (x,), (wk, wv), R.tuple(), R.str("f32"), ty_args=TWO)
            parts = R.split(y, [8], axis=-1)
            k = R.reshape(parts[0], (4, 1, 8))
            v = R.reshape(parts[1], (4, 1, 8))
            r = R.call_pure_packed("dflashc.rope", k, table, R.str("neox"), ty_args=KV)
            t = R.call_pure_packed("dflashc.cache_write", r, v, k_cache, v_cache, state, ty_args=TOKEN)
            R.output(t)
        return t

    assert_keeps(fuse_kv_injection, function)


def test_a_split_of_something_else_keeps_the_graph() -> None:
    @R.function
    def function(y: TWO, norm: HEAD, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            parts = R.split(y, [8], axis=-1)
            k = R.reshape(parts[0], (4, 1, 8))
            v = R.reshape(parts[1], (4, 1, 8))
            n = R.call_pure_packed("dflashc.rms_norm", k, norm, T.float64(1e-6), ty_args=KV)
            r = R.call_pure_packed("dflashc.rope", n, table, R.str("neox"), ty_args=KV)
            t = R.call_pure_packed("dflashc.cache_write", r, v, k_cache, v_cache, state, ty_args=TOKEN)
            R.output(t)
        return t

    assert_keeps(fuse_kv_injection, function)
