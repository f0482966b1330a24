"""Gemma 3 (text): norms before and after each sublayer, GeGLU, five sliding layers to one global, two rope bases.

Source: Gemma Team 2025, "Gemma 3 Technical Report", section 2. The embedding is scaled by sqrt(hidden).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dflashc.compiler.gguf import GgufFile
from dflashc.compiler.models.config import (
    MAX_CONTEXT,
    ModelConfig,
    read_config,
    read_count,
    read_positive,
    read_rope,
    require_in_layers,
)

if TYPE_CHECKING:
    from dflashc.compiler.models.graph import Expr, Graph

_PERIOD = 6  # the last layer of each period is global


def config(gguf: GgufFile) -> ModelConfig:
    c = read_config(gguf, pairing="neox")
    require_in_layers(gguf, c, "attn_q_norm.weight", "attn_k_norm.weight")
    window = read_count(gguf, "gemma3.attention.sliding_window", MAX_CONTEXT)
    local = read_rope(gguf, "local", "neox", c.head_size, base_key="rope.freq_base_swa", scaled=False)
    sliding = [number % _PERIOD < _PERIOD - 1 for number in range(c.layers)]
    # The 27B model scales by its hidden size per head, all others by the head size.
    scale = (c.hidden // c.heads if c.layers == 62 else c.head_size) ** -0.5
    return replace(c, ropes=(*c.ropes, local), layer_ropes=tuple(int(s) for s in sliding),
                   layer_windows=tuple(window if s else 0 for s in sliding),
                   attention_scale=read_positive(gguf, "gemma3.attention.scale", default=scale),
                   embedding_scale=math.sqrt(c.hidden))


def layer(g: Graph, x: Expr, number: int, table: Expr) -> Expr:
    blk = f"blk.{number}"
    o = g.attention(g.norm(x, f"{blk}.attn_norm"), number, table)
    x = g.add(x, g.norm(o, f"{blk}.post_attention_norm"))
    f = g.gated_feed_forward(g.norm(x, f"{blk}.ffn_norm"), number, "gelu_tanh")
    return g.add(x, g.norm(f, f"{blk}.post_ffw_norm"))
