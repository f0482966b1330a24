"""FuseAttention: from the merged Q, K, V to the attention's output in one call.

Head norms, rope, the cache write and the attention itself become `attention_block`: on a device one launch, or a few.
"""

from __future__ import annotations

import tvm

from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.passes.rewriting import Rewriter, rewrite_module


def fuse_attention(module: tvm.IRModule) -> tvm.IRModule:
    return rewrite_module(module, _rule)


def _rule(r: Rewriter, var: Expr, value: Expr) -> Expr | None:
    """Matches reshape(attention(rope(norm?(reshape(part 0))), rope(norm?(reshape(part 1))), reshape(part 2), …))."""
    if op.name_of(value) != "relax.reshape" or not r.is_call(value.args[0], "dflashc.attention"):
        return None
    q, k, v, sinks, k_cache, v_cache, state, window, scale, mask = r.arguments(value.args[0])
    if not (r.is_call(q, "dflashc.rope") and r.is_call(k, "dflashc.rope")):
        return None
    (q_input, table, pairing), (k_input, k_table, k_pairing) = r.arguments(q), r.arguments(k)
    if not table.same_as(k_table) or op.scalar(pairing) != op.scalar(k_pairing):
        return None
    norms, epsilon = [], 0.0
    if r.is_call(q_input, "dflashc.rms_norm") and r.is_call(k_input, "dflashc.rms_norm"):
        (q_input, q_weight, eps), (k_input, k_weight, k_eps) = r.arguments(q_input), r.arguments(k_input)
        if op.scalar(eps) != op.scalar(k_eps):
            return None
        norms, epsilon = [q_weight, k_weight], op.scalar(eps)
    parts = [r.split_part(x) for x in (q_input, k_input, v)]
    sources = [p[0] for p in parts if p is not None]
    if [p and p[1] for p in parts] != [0, 1, 2] or not all(s.same_as(sources[0]) for s in sources):
        return None
    heads = (int(op.shape(q)[1]), int(op.shape(k)[1]), int(op.shape(q)[2]))
    if op.shape(sources[0])[1] != (heads[0] + 2 * heads[1]) * heads[2] or len(op.shape(var)) != 2:
        return None
    return op.attention_block(r.new(sources[0]), norms, list(sinks), r.new(table), [k_cache, v_cache], state, heads,
                              op.scalar(pairing), op.scalar(window), op.scalar(scale), op.scalar(mask), epsilon, "f32")
