"""Qwen 3 (dense): Llama's graph with rope of halves and an RMS norm on every head of Q and K.

Source: Yang et al. 2025, "Qwen3 Technical Report", section 2.
"""

from __future__ import annotations

from dflashc.compiler.gguf import GgufFile
from dflashc.compiler.models.config import ModelConfig, read_config, require_in_layers
from dflashc.compiler.models.llama import layer as layer


def config(gguf: GgufFile) -> ModelConfig:
    c = read_config(gguf, pairing="neox")
    require_in_layers(gguf, c, "attn_q_norm.weight", "attn_k_norm.weight")
    return c
