"""Llama 2 and 3, and the many models that share their graph: pre-norm, rope of adjacent pairs, SwiGLU.

Source: Touvron et al. 2023, "LLaMA"; GGUF converters permute the rows of Q and K so that pairs are adjacent.
"""

from __future__ import annotations

from tvm import relax

from dflashc.compiler.gguf import GgufFile
from dflashc.compiler.models.config import ModelConfig, read_config
from dflashc.compiler.models.graph import Graph, attention, gated_feed_forward


def config(gguf: GgufFile) -> ModelConfig:
    return read_config(gguf, pairing="norm")


def layer(g: Graph, x: relax.Expr, number: int, table: relax.Expr) -> relax.Expr:
    x = g.emit(relax.op.add(x, attention(g, g.norm(x, f"blk.{number}.attn_norm"), number, table)))
    u = g.norm(x, f"blk.{number}.ffn_norm")
    return g.emit(relax.op.add(x, gated_feed_forward(g, u, number, relax.op.nn.silu)))
