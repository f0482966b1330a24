"""FuseAttention: from merged Q, K and V to one call, and the graphs it must leave as they are."""
# mypy: disable-error-code="valid-type"

import pytest
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

from dflashc.passes.fuse_attention import fuse_attention
from tests.passes.compare import assert_keeps, assert_rewrites

# Two query heads and one key-value head of 8.
QKV, Q_FLAT, KV_FLAT = R.Tensor((4, 32), "float32"), R.Tensor((4, 16), "float32"), R.Tensor((4, 8), "float32")
Q, KV, HEAD = R.Tensor((4, 2, 8), "float32"), R.Tensor((4, 1, 8), "float32"), R.Tensor((8,), "float32")
TABLE, CACHE, STATE = R.Tensor((2, 4, 4), "float32"), R.Tensor((1, 64, 8), "float16"), R.Tensor((8,), "int64")
WIDER, SINKS = R.Tensor((4, 40), "float32"), R.Tensor((2,), "float32")


def test_without_head_norms() -> None:
    @R.function
    def before(qkv: QKV, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            parts = R.split(qkv, [16, 24], axis=-1)
            q = R.reshape(parts[0], (4, 2, 8))
            k = R.reshape(parts[1], (4, 1, 8))
            v = R.reshape(parts[2], (4, 1, 8))
            q1 = R.call_pure_packed("dflashc.rope", q, table, R.str("norm"), ty_args=Q)
            k1 = R.call_pure_packed("dflashc.rope", k, table, R.str("norm"), ty_args=KV)
            o = R.call_pure_packed("dflashc.attention", q1, k1, v, R.tuple(), k_cache, v_cache, state,
                                   T.int64(16), T.float64(0.25), R.str("causal"), ty_args=Q)
            result = R.reshape(o, (4, 16))
            R.output(result)
        return result

    @R.function
    def after(qkv: QKV, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            result = R.call_pure_packed(
                "dflashc.attention_block", qkv, R.tuple(), R.tuple(), table, k_cache, v_cache, state, T.int64(2),
                T.int64(1), T.int64(8), R.str("norm"), T.int64(16), T.float64(0.25), R.str("causal"), T.float64(0.0),
                R.str("f32"), ty_args=Q_FLAT)
            R.output(result)
        return result

    assert_rewrites(fuse_attention, before, after)


def head_norms(order: tuple[int, int, int] = (0, 1, 2), k_pairing: str = "neox", k_epsilon: float = 1e-6,
               other_table: bool = False) -> relax.Function:
    """Attention with head norms and sinks, where Q and K may differ in what the fused call has once."""
    first, second, third = order
    index = 1 if other_table else 0

    @R.function
    def function(qkv: QKV, q_norm: HEAD, k_norm: HEAD, sinks: SINKS, table: TABLE, table1: TABLE, k_cache: CACHE,
                 v_cache: CACHE, state: STATE):
        with R.dataflow():
            parts = R.split(qkv, [16, 24], axis=-1)
            q = R.reshape(parts[first], (4, 2, 8))
            k = R.reshape(parts[second], (4, 1, 8))
            v = R.reshape(parts[third], (4, 1, 8))
            q1 = R.call_pure_packed("dflashc.rms_norm", q, q_norm, T.float64(1e-6), ty_args=Q)
            k1 = R.call_pure_packed("dflashc.rms_norm", k, k_norm, T.float64(k_epsilon), ty_args=KV)
            q2 = R.call_pure_packed("dflashc.rope", q1, table, R.str("neox"), ty_args=Q)
            k2 = R.call_pure_packed("dflashc.rope", k1, [table, table1][index], R.str(k_pairing), ty_args=KV)
            o = R.call_pure_packed("dflashc.attention", q2, k2, v, (sinks,), k_cache, v_cache, state,
                                   T.int64(0), T.float64(0.25), R.str("causal"), ty_args=Q)
            result = R.reshape(o, (4, 16))
            R.output(result)
        return result

    return function


def test_with_head_norms_and_sinks() -> None:
    @R.function
    def after(qkv: QKV, q_norm: HEAD, k_norm: HEAD, sinks: SINKS, table: TABLE, table1: TABLE, k_cache: CACHE,
              v_cache: CACHE, state: STATE):
        with R.dataflow():
            result = R.call_pure_packed(
                "dflashc.attention_block", qkv, (q_norm, k_norm), (sinks,), table, k_cache, v_cache, state, T.int64(2),
                T.int64(1), T.int64(8), R.str("neox"), T.int64(0), T.float64(0.25), R.str("causal"), T.float64(1e-6),
                R.str("f32"), ty_args=Q_FLAT)
            R.output(result)
        return result

    assert_rewrites(fuse_attention, head_norms(), after)


@pytest.mark.parametrize("unlike", [
    {"k_pairing": "norm"}, {"k_epsilon": 1e-5}, {"other_table": True}, {"order": (0, 2, 1)}, {"order": (0, 1, 1)},
])
def test_what_differs_between_q_and_k_keeps_the_graph(unlike: dict) -> None:
    assert_keeps(fuse_attention, head_norms(**unlike))


def test_a_norm_of_q_alone_keeps_the_graph() -> None:
    @R.function
    def function(qkv: QKV, q_norm: HEAD, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            parts = R.split(qkv, [16, 24], axis=-1)
            q = R.reshape(parts[0], (4, 2, 8))
            k = R.reshape(parts[1], (4, 1, 8))
            v = R.reshape(parts[2], (4, 1, 8))
            q1 = R.call_pure_packed("dflashc.rms_norm", q, q_norm, T.float64(1e-6), ty_args=Q)
            q2 = R.call_pure_packed("dflashc.rope", q1, table, R.str("neox"), ty_args=Q)
            k2 = R.call_pure_packed("dflashc.rope", k, table, R.str("neox"), ty_args=KV)
            o = R.call_pure_packed("dflashc.attention", q2, k2, v, R.tuple(), k_cache, v_cache, state,
                                   T.int64(0), T.float64(0.25), R.str("causal"), ty_args=Q)
            result = R.reshape(o, (4, 16))
            R.output(result)
        return result

    assert_keeps(fuse_attention, function)


def test_projections_that_did_not_merge_keep_the_graph() -> None:
    @R.function
    def function(q0: Q_FLAT, kv: Q_FLAT, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            parts = R.split(kv, [8], axis=-1)
            q = R.reshape(q0, (4, 2, 8))
            k = R.reshape(parts[0], (4, 1, 8))
            v = R.reshape(parts[1], (4, 1, 8))
            q1 = R.call_pure_packed("dflashc.rope", q, table, R.str("neox"), ty_args=Q)
            k1 = R.call_pure_packed("dflashc.rope", k, table, R.str("neox"), ty_args=KV)
            o = R.call_pure_packed("dflashc.attention", q1, k1, v, R.tuple(), k_cache, v_cache, state,
                                   T.int64(0), T.float64(0.25), R.str("causal"), ty_args=Q)
            result = R.reshape(o, (4, 16))
            R.output(result)
        return result

    assert_keeps(fuse_attention, function)


def test_a_fourth_projection_of_the_same_input_keeps_the_graph() -> None:
    @R.function
    def function(merged: WIDER, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            parts = R.split(merged, [16, 24, 32], axis=-1)
            q = R.reshape(parts[0], (4, 2, 8))
            k = R.reshape(parts[1], (4, 1, 8))
            v = R.reshape(parts[2], (4, 1, 8))
            q1 = R.call_pure_packed("dflashc.rope", q, table, R.str("neox"), ty_args=Q)
            k1 = R.call_pure_packed("dflashc.rope", k, table, R.str("neox"), ty_args=KV)
            o = R.call_pure_packed("dflashc.attention", q1, k1, v, R.tuple(), k_cache, v_cache, state,
                                   T.int64(0), T.float64(0.25), R.str("causal"), ty_args=Q)
            flat = R.reshape(o, (4, 16))
            result = (flat, parts[3])
            R.output(result)
        return result

    assert_keeps(fuse_attention, function)


def test_attention_without_rope_keeps_the_graph() -> None:
    @R.function
    def function(qkv: QKV, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            parts = R.split(qkv, [16, 24], axis=-1)
            q = R.reshape(parts[0], (4, 2, 8))
            k = R.reshape(parts[1], (4, 1, 8))
            v = R.reshape(parts[2], (4, 1, 8))
            o = R.call_pure_packed("dflashc.attention", q, k, v, R.tuple(), k_cache, v_cache, state,
                                   T.int64(0), T.float64(0.25), R.str("causal"), ty_args=Q)
            result = R.reshape(o, (4, 16))
            R.output(result)
        return result

    assert_keeps(fuse_attention, function)


def test_a_result_that_stays_in_heads_keeps_the_graph() -> None:
    @R.function
    def function(qkv: QKV, table: TABLE, k_cache: CACHE, v_cache: CACHE, state: STATE):
        with R.dataflow():
            parts = R.split(qkv, [16, 24], axis=-1)
            q = R.reshape(parts[0], (4, 2, 8))
            k = R.reshape(parts[1], (4, 1, 8))
            v = R.reshape(parts[2], (4, 1, 8))
            q1 = R.call_pure_packed("dflashc.rope", q, table, R.str("neox"), ty_args=Q)
            k1 = R.call_pure_packed("dflashc.rope", k, table, R.str("neox"), ty_args=KV)
            o = R.call_pure_packed("dflashc.attention", q1, k1, v, R.tuple(), k_cache, v_cache, state,
                                   T.int64(0), T.float64(0.25), R.str("causal"), ty_args=Q)
            result = R.reshape(o, (4, 1, 16))
            R.output(result)
        return result

    assert_keeps(fuse_attention, function)
