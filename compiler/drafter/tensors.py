"""A drafter's tensors under their canonical names, complete and of the right shapes.

Owns which tensors each version of DFlash has. Knows nothing of metadata.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflashc.compiler.drafter.dialects import TENSORS, UNSUPPORTED_TENSORS, tensor_aliases
from dflashc.compiler.gguf import GgufFile, GgufTensor
from dflashc.runtime.errors import PairError

_GLOBAL = ("fc.weight", "enc.output_norm.weight", "output_norm.weight")
_GLOBAL_2 = ("selector_hidden.weight", "selector_predecessor.weight", "selector_successor.weight")
_GLOBAL_OPTIONAL = ("token_embd.weight", "output.weight", "d2t", "rope_freqs.weight")
_LAYER = (
    "attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_q_norm.weight", "attn_k_norm.weight",
    "attn_output.weight", "ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight",
)
_LAYER_2 = ("attn_conv_base", "attn_conv_proj.weight", "ffn_conv_base", "ffn_conv_proj.weight")
_JOINT_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
BIASES = (*_JOINT_BIASES, "attn_output.bias")
SINKS = "attn_sinks.weight"


@dataclass(frozen=True)
class Sizes:
    """What shapes follow from; the last four are 0 in version 1."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0


def version(gguf: GgufFile) -> int:
    """1 or 2, told by the tensors alone: a single one of version 2 makes it version 2."""
    names = {alias for name in _GLOBAL_2 for alias in tensor_aliases(name)}
    names |= {alias for name in _LAYER_2 for alias in tensor_aliases(f"blk.0.{name}")}
    return 2 if names & gguf.tensors.keys() else 1


def nested_names(gguf: GgufFile) -> bool:
    """Whether the tensors of version 2 have other names than the canonical ones."""
    return any(alias in gguf.tensors for name in _GLOBAL_2 for alias in TENSORS[name])


def refuse_unsupported(gguf: GgufFile) -> None:
    """Raise `PairError` for a tensor of a feature that is not supported, and for a file without tensors."""
    path = gguf.paths[0]
    if not gguf.tensors:
        raise PairError(f"{path} has metadata but no tensors; give the whole drafter, not its first part alone")
    for name in gguf.tensors:
        for pattern, feature in UNSUPPORTED_TENSORS:
            if re.fullmatch(pattern, name):
                raise PairError(f"{path}: tensor {name!r} belongs to {feature}, which is not supported; "
                                "use a DFlash or DFlash2 drafter")
    if {"blk.0.ffn_norm.weight", "blk.0.post_attention_norm.weight"} <= gguf.tensors.keys():
        raise PairError(f"{path}: tensor 'blk.0.post_attention_norm.weight' beside ffn_norm belongs to a body with "
                        "norms after its sublayers, which is not supported; use a drafter with a Qwen3 body")


def collect(gguf: GgufFile, layers: int) -> tuple[dict[str, GgufTensor], list[str]]:
    """The tensors by canonical name, and the names of those that are not used.

    Raises `PairError` naming everything that was looked for when one is missing.
    """
    two = version(gguf) == 2
    required = [*_GLOBAL, *(_GLOBAL_2 if two else ())]
    required += [f"blk.{n}.{name}" for n in range(layers) for name in (*_LAYER, *(_LAYER_2 if two else ()))]
    optional = [*_GLOBAL_OPTIONAL, *(f"blk.{n}.{name}" for n in range(layers) for name in (*BIASES, SINKS))]
    found = {name: tensor for name in (*required, *optional) if (tensor := _find(gguf, name)) is not None}
    missing = [name for name in required if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise PairError(f"{gguf.paths[0]}: tensor {' or '.join(tensor_aliases(missing[0]))}{more} not found; "
                        f"a DFlash{'2' if two else ''} drafter of {layers} layers needs it")
    for name in (*BIASES, SINKS):
        have = sum(f"blk.{n}.{name}" in found for n in range(layers))
        if have not in (0, layers):
            raise PairError(f"{gguf.paths[0]}: {have} of {layers} layers have a tensor {name}; expected all or none")
    biased = [name for name in _JOINT_BIASES if f"blk.0.{name}" in found]
    if len(biased) not in (0, len(_JOINT_BIASES)):
        raise PairError(f"{gguf.paths[0]}: of {', '.join(_JOINT_BIASES)} the layers have {', '.join(biased)} alone; "
                        "expected all or none; the drafter was converted wrongly")
    used = {tensor.name for tensor in found.values()}
    return found, [name for name in gguf.tensors if name not in used]


def _find(gguf: GgufFile, canonical: str) -> GgufTensor | None:
    return next((gguf.tensors[name] for name in tensor_aliases(canonical) if name in gguf.tensors), None)


def check_shapes(tensors: dict[str, GgufTensor], sizes: Sizes) -> None:
    """Raise `PairError` for a tensor of another shape than `sizes` say, or of a type that cannot be read.

    Tables with a row per token are checked in their columns.
    """
    expected = _global_shapes(sizes)
    for number in range(sizes.layers):
        expected |= {f"blk.{number}.{name}": shape for name, shape in _layer_shapes(sizes).items()}
    for name, tensor in tensors.items():
        if tensor.format is None:
            raise PairError(f"{tensor.path}: tensor {tensor.name!r} has type id {tensor.type_id}, which is not known; "
                            "requantise the drafter with llama.cpp")
        shape = expected.get(name)
        if shape is None:
            continue
        fits = len(tensor.shape) == len(shape) and all(
            want in (None, got) for want, got in zip(shape, tensor.shape, strict=True))
        if not fits:
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise PairError(f"{tensor.path}: tensor {tensor.name!r} has shape {tensor.shape}; expected ({wanted}) "
                            "from the sizes in the metadata; the drafter was converted wrongly")


def _global_shapes(s: Sizes) -> dict[str, tuple[int | None, ...]]:
    return {
        "fc.weight": (s.hidden, None),
        "enc.output_norm.weight": (s.hidden,),
        "output_norm.weight": (s.hidden,),
        "token_embd.weight": (None, s.hidden),
        "output.weight": (None, s.hidden),
        "d2t": (None,),
        "selector_hidden.weight": (s.selector_rank, s.hidden),
        "selector_predecessor.weight": (None, s.selector_rank),
        "selector_successor.weight": (None, s.selector_rank),
    }


def _layer_shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    base = (2, s.conv_kernel_size, s.hidden)
    projection = (2 * s.conv_kernel_size * (s.hidden // max(s.conv_group_size, 1)), s.hidden)
    return {
        "attn_norm.weight": (s.hidden,),
        "attn_q.weight": (q, s.hidden), "attn_q.bias": (q,),
        "attn_k.weight": (kv, s.hidden), "attn_k.bias": (kv,),
        "attn_v.weight": (kv, s.hidden), "attn_v.bias": (kv,),
        "attn_output.weight": (s.hidden, q), "attn_output.bias": (s.hidden,),
        "attn_q_norm.weight": (s.head_size,), "attn_k_norm.weight": (s.head_size,),
        "attn_sinks.weight": (s.heads,),
        "ffn_norm.weight": (s.hidden,),
        "ffn_gate.weight": (s.feed_forward, s.hidden),
        "ffn_up.weight": (s.feed_forward, s.hidden),
        "ffn_down.weight": (s.hidden, s.feed_forward),
        "attn_conv_base": base, "attn_conv_proj.weight": projection,
        "ffn_conv_base": base, "ffn_conv_proj.weight": projection,
    }
