"""Llama 2 and 3, and the many models that share their graph: pre-norm, rope of adjacent pairs, SwiGLU.

Source: Touvron et al. 2023, "LLaMA"; GGUF converters permute the rows of Q and K so that pairs are adjacent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflashc.compiler.gguf import GgufFile
from dflashc.compiler.models.config import ModelConfig, read_config

if TYPE_CHECKING:
    from dflashc.compiler.models.graph import Expr, Graph


def config(gguf: GgufFile) -> ModelConfig:
    return read_config(gguf, pairing="norm")


def layer(g: Graph, x: Expr, number: int, table: Expr) -> Expr:
    x = g.add(x, g.attention(g.norm(x, f"blk.{number}.attn_norm"), number, table))
    return g.add(x, g.gated_feed_forward(g.norm(x, f"blk.{number}.ffn_norm"), number, "silu"))
