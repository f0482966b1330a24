"""Qwen 2 and 2.5: Llama's graph with rope of halves and biases on Q, K and V.

Source: Yang et al. 2024, "Qwen2 Technical Report", section 2.2.
"""

from __future__ import annotations

from dflashc.compiler.gguf import GgufFile
from dflashc.compiler.models.config import ModelConfig, read_config
from dflashc.compiler.models.llama import layer as layer


def config(gguf: GgufFile) -> ModelConfig:
    return read_config(gguf, pairing="neox")
