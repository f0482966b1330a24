"""Block formats that the weights of a model are taken to have, as functions of their names, and the forms they read."""

from __future__ import annotations

from collections.abc import Callable

Formats = Callable[[str], str]


def plain(name: str) -> str:
    return "F32"


def q8_0(name: str) -> str:
    return "Q8_0"


def q4_k_m(name: str) -> str:
    """K-quants of two kinds."""
    return "Q6_K" if name.split(".")[-2] in ("attn_v", "ffn_down", "token_embd") else "Q4_K"


def mixed(name: str) -> str:
    """Formats that want different forms of one input, also between gate and up."""
    role = name.split(".")[-2]
    return {"attn_v": "Q8_0", "ffn_up": "Q5_0", "attn_output": "F16"}.get(role, "Q4_K")


def form_of(block_format: str) -> str:
    if block_format in ("F32", "F16"):
        return "f32"
    return "q8_256" if block_format.endswith("_K") else "q8_32"
