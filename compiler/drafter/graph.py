"""Writes a drafter's graph, unfused: the injection of context features, and the block that is drafted.

Functions: `inject` (taps of committed rows into the drafter's K/V caches), `draft` (block tokens to the residual
stream) and `propose` (residual rows after the anchor to token ids); version 1 has `weigh` too, which proposes the same
and says how sure it is, as `propose` of version 2 always does. The body is Qwen 3's, whatever the target's; DFlash2
adds local convolutions around each sublayer and the candidate selector. Knows nothing of dialects or speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tvm

from dflashc.compiler.drafter.config import INJECTED, PREFIX, DrafterConfig
from dflashc.compiler.gguf import GgufTensor
from dflashc.compiler.models.config import ModelConfig
from dflashc.compiler.models.graph import Expr, Graph
from dflashc.compiler.models.relax_graph import RelaxGraph, function

CONFIDENCE_CANDIDATES = 10
"""Logits that a confidence of version 1 is a share of; llama.cpp's p-min looks at as many."""


def body_config(drafter: DrafterConfig, vocabulary: int) -> ModelConfig:
    """The drafter's body as a decoder's configuration; `vocabulary` is that of the table it embeds with."""
    return ModelConfig(
        architecture="dflash", layers=drafter.layers, hidden=drafter.hidden, feed_forward=drafter.feed_forward,
        heads=drafter.heads, kv_heads=drafter.kv_heads, head_size=drafter.head_size, vocabulary=vocabulary,
        context_length=drafter.context_length, epsilon=drafter.epsilon, ropes=(drafter.rope,),
        layer_ropes=(0,) * drafter.layers, layer_windows=drafter.layer_windows,
        attention_scale=drafter.attention_scale, embedding_scale=drafter.embedding_scale,
        logit_softcap=drafter.logit_softcap)


def drafter_module(drafter: DrafterConfig, tensors: Mapping[str, GgufTensor],
                   target_tensors: Mapping[str, GgufTensor]) -> tvm.IRModule:
    """`inject`, `draft`, `propose` and, of version 1, `weigh`.

    Parameters
    ----------
    tensors : mapping
        The drafter's tensors by canonical name.
    target_tensors : mapping
        The target's, for the embedding and head that the drafter shares.
    """
    config = body_config(drafter, target_tensors["token_embd.weight"].shape[0])

    def graph() -> RelaxGraph:
        return RelaxGraph(tensors, config, PREFIX)

    module = tvm.IRModule()
    module["inject"] = function(graph(), lambda g: _inject(g, drafter))
    module["draft"] = function(graph(), lambda g: _draft(g, drafter, target_tensors))
    module["propose"] = function(graph(), lambda g: _propose(g, drafter, target_tensors))
    if drafter.version == 1:
        module["weigh"] = function(graph(), lambda g: _weigh(g, drafter, target_tensors))
    return module


def _inject(g: Graph, drafter: DrafterConfig) -> list[Expr]:
    """K and V of every layer from the fused features; the layers themselves never run over the context.

    Layers with the same window follow each other, as their caches do in memory.
    """
    c = g.config
    width = drafter.target_hidden * len(drafter.taps)
    projections = dataclasses.replace(g, prefix=INJECTED)  # the same function, other parameters
    features = g.input("features", (g.rows, width), "float32")
    context = g.norm(g.linear(features, "fc", c.hidden, width), "enc.output_norm")
    table = g.rope_table(drafter.context_rope)
    writes = []
    for layer in sorted(range(c.layers), key=lambda number: c.layer_windows[number]):
        k, v = (projections.heads(context, f"blk.{layer}.attn_{which}", c.kv_heads) for which in "kv")
        k = g.call("rope", g.norm(k, f"blk.{layer}.attn_k_norm", c.head_size), table, c.ropes[0].pairing)
        writes.append(g.call("cache_write", k, v, g.cache(layer, "k"), g.cache(layer, "v"), g.state))
    return writes


def _draft(g: Graph, drafter: DrafterConfig, target_tensors: Mapping[str, GgufTensor]) -> Expr:
    c = g.config
    tokens = g.input("block", (g.rows,), "int32")
    table = g.rope_table(c.ropes[0], tokens)
    x = g.call("embed", tokens, _shared(g, drafter.embedding, "token_embd.weight", target_tensors), c.embedding_scale,
               name="residual")
    for layer in range(c.layers):
        causal = drafter.causal_sliding if c.layer_windows[layer] else drafter.causal_full
        x = _layer(g, drafter, x, layer, table, "causal" if causal else "block")
    return x


def _layer(g: Graph, drafter: DrafterConfig, x: Expr, layer: int, table: Expr, mask: str) -> Expr:
    """Pre-norm attention and SwiGLU; in version 2 each between two local convolutions."""
    blk = f"blk.{layer}"
    for name, sublayer in (("attn", lambda u: g.attention(u, layer, table, mask)),
                           ("ffn", lambda u: g.gated_feed_forward(u, layer, "silu"))):
        u = g.norm(x, f"{blk}.{name}_norm")
        if drafter.version == 1:
            x = g.add(x, sublayer(u))
            continue
        taps, groups = drafter.conv_kernel_size, drafter.hidden // drafter.conv_group_size
        dynamic = g.linear(u, f"{blk}.{name}_conv_proj", 2 * taps * groups, drafter.hidden)
        base = g.weight(f"{blk}.{name}_conv_base", 2, taps, drafter.hidden)
        y = sublayer(g.call("local_convolution", u, dynamic, base, 0))
        x = g.add(x, g.call("local_convolution", y, dynamic, base, 1))
    return x


def _propose(g: Graph, drafter: DrafterConfig, target_tensors: Mapping[str, GgufTensor]) -> Expr:
    """Row i of `hidden` is row i + 1 of the block: the anchor's own row proposes nothing."""
    c = g.config
    x, logits = _head(g, drafter, target_tensors)
    d2t = _d2t(g, drafter)
    if drafter.version == 1:  # scale and softcap are monotone: they do not move the arg-max
        ids = g.call("argmax", logits, name="ids")
        return g.call("look_up", ids, *d2t, name="tokens") if d2t else ids
    rank = drafter.selector_rank
    projected = g.linear(x, "selector_hidden", rank, c.hidden)
    predecessor, successor = (g.weight(f"selector_{which}.weight", c.vocabulary, rank)
                              for which in ("predecessor", "successor"))
    block = g.input("block", (g.rows,), "int32")
    return g.call("select_candidates", _finish(g, drafter, logits), d2t, projected, block, g.state, g.sampling,
                  predecessor, successor, drafter.selector_top_k, name="proposals")


def _weigh(g: Graph, drafter: DrafterConfig, target_tensors: Mapping[str, GgufTensor]) -> Expr:
    """What `propose` of version 1 gives, with confidence."""
    _, logits = _head(g, drafter, target_tensors)
    return g.call("best_candidate", _finish(g, drafter, logits), _d2t(g, drafter), CONFIDENCE_CANDIDATES,
                  name="proposals")


def _head(g: Graph, drafter: DrafterConfig, target_tensors: Mapping[str, GgufTensor]) -> tuple[Expr, Expr]:
    """The normed hidden state of the rows, and its product with the head."""
    x = g.norm(g.input("hidden", (g.rows, g.config.hidden), "float32"), "output_norm")
    head = _shared(g, "shared" if drafter.head == "shared" else "own",
                   "token_embd.weight" if drafter.head == "tied" else "output.weight", target_tensors)
    return x, g.call("linear", x, head, name="logits")


def _d2t(g: Graph, drafter: DrafterConfig) -> list[Expr]:
    """The token of each of the head's rows; empty where row i is token i."""
    return [g.input(f"{PREFIX}d2t", (drafter.draft_vocabulary,), "int32")] if drafter.draft_vocabulary else []


def _finish(g: Graph, drafter: DrafterConfig, logits: Expr) -> Expr:
    """Scaled and capped, as the drafter was trained."""
    if drafter.logit_scale != 1:
        logits = g.call("scale", logits, drafter.logit_scale)
    if drafter.logit_softcap:
        logits = g.call("softcap", logits, drafter.logit_softcap)
    return logits


def _shared(g: Graph, owner: str, name: str, target_tensors: Mapping[str, GgufTensor]) -> Expr:
    """A table with a row per token: the drafter's own, or the target's."""
    if owner == "own":
        return g.weight(name, g.tensors[name].shape[0], g.config.hidden)
    actual = name if name in target_tensors else "token_embd.weight"  # a target without a head of its own is tied
    return g.input(actual, target_tensors[actual].shape, "float32")
