"""A target that counts, and drafters that can or cannot: pairs whose every acceptance is known by hand.

The target follows each token with its `successor`, which goes round in circles of 15 tokens, whatever came before. The
*oracle* drafter looks back as far as a block reaches, where a text that goes round has the same token; the *blind* one
sees nothing but its masks, and always proposes the mask's successor. Knows nothing of how a pair is built or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from dflashc.compiler.gguf import open_gguf

from .drafter import DrafterShape, drafter_body, drafter_tensors, mask_token, write_drafter_of
from .target import TargetShape, target_tensors, write_target_of
from .tensors import Formats, Tensor

PERIOD = 15
"""Tokens of a circle. One more is how far the last row of a block of 16 looks back to see only committed tokens."""

VOCABULARY = 20 * PERIOD
HIDDEN = 64

_SHAPE = TargetShape("qwen3", 3, HIDDEN, 2, 1, HIDDEN, 128, VOCABULARY, context_length=4096, rope_base=100.0,
                     tied=False, weight_scale=0.02)
_TAPS = (0, 1)
_LOOK_BACK = {1: PERIOD + 1.0, 2: PERIOD + 1.53}  # tokens, by version; what lies that far back is before the proposal
_SHARPNESS = {1: 60.0, 2: 20.0}  # of the looking, so that version 1 sees one token and version 2 the two nearest
_GAIN = 8.0  # of what is seen over the mask's embedding
_HEAD_SCALE = 0.125
_EDGE = 0.25  # times 64, the score of a successor in the candidate selector: more than logits differ


def successor(token: int) -> int:
    """The token that the target gives after `token`."""
    return token // PERIOD * PERIOD + (token + 1) % PERIOD


def write_counting_target(path: Path, formats: Formats, seed: int = 0) -> None:
    """Write the target: 300 tokens, hidden size 64, three layers of which each adds little to the embedding.

    An embedding is a constant, 1, and a code of 63 signs. A row of the head is the code of the token before.
    """
    write_target_of(path, _SHAPE, _counting(target_tensors(_SHAPE), _codes(seed)), formats, seed)


def write_counting_drafter(path: Path, target_path: Path, formats: Formats, kind: Literal["oracle", "blind"],
                           version: int = 1, own_tables: bool = False, seed: int = 0) -> None:
    """Write a drafter for `write_counting_target(target_path, ..., seed)`: two layers, block of 16, one sliding layer.

    The oracle needs 17 committed tokens that go round. The window of its sliding layer ends where it looks. In version
    1 it sees the token to propose; in version 2 more of the token before that one, and the candidate selector decides.

    Parameters
    ----------
    own_tables
        The drafter has embedding and head of its own, with mirrored codes: the target's would propose other tokens.
    """
    body = replace(drafter_body(target_path, layers=2), weight_scale=0.02)
    window = int(np.ceil(_LOOK_BACK[version])) + 1
    shape = DrafterShape(body, _TAPS, PERIOD + 1, window, version, selector_rank=HIDDEN)
    codes = _codes(seed)
    mirror = np.full(HIDDEN, -1.0 if own_tables else 1.0, np.float32)
    mirror[0] = 1
    tables = _tables(codes * mirror) if own_tables else ()
    tensors = _looking_back(drafter_tensors(shape), shape, codes, mirror, kind)
    write_drafter_of(path, target_path, shape, [*tables, *tensors], formats, seed)


def proposal_of_the_blind(target_path: Path) -> int:
    """What the blind drafter proposes at every place."""
    with open_gguf(target_path) as target:
        return successor(mask_token(target))


def _codes(seed: int) -> np.ndarray:
    """Embeddings (vocabulary, hidden): 1, then signs that are orthogonal inside a circle and random between circles."""
    index = np.arange(HIDDEN)
    hadamard = 1 - 2 * (np.bitwise_count(index[:, None] & index) % 2).astype(np.float32)  # Sylvester's
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), (VOCABULARY // PERIOD, 1, HIDDEN))
    signs[..., 0] = 1
    return (signs * hadamard[1 : PERIOD + 1]).reshape(VOCABULARY, HIDDEN)


def _tables(codes: np.ndarray) -> Iterator[Tensor]:
    """Embedding and head that count."""
    head = np.empty_like(codes)
    head[[successor(token) for token in range(len(codes))]] = codes * _HEAD_SCALE
    head[:, 0] = 0
    yield Tensor("token_embd.weight", codes.shape, values=codes)
    yield Tensor("output.weight", head.shape, values=head)


def _counting(tensors: Iterable[Tensor], codes: np.ndarray) -> Iterator[Tensor]:
    tables = {tensor.name: tensor for tensor in _tables(codes)}
    for tensor in tensors:
        if tensor.name == "output_norm.weight":
            yield replace(tensor, deviation=0.0)
        else:
            yield tables.get(tensor.name, tensor)


def _looking_back(tensors: Iterable[Tensor], shape: DrafterShape, codes: np.ndarray, mirror: np.ndarray,
                  kind: str) -> Iterator[Tensor]:
    """The tensors of a drafter whose first layer adds what stands a fixed distance before to each row.

    The fusion averages the taps, which are close to the embedding. Queries and keys come from its constant alone: in
    every rotary pair a query is 1 and a key is turned ahead by the distance, so that the score at distance D is the
    sum of cos((D - distance) * frequency). All other layers add nothing.
    """
    body = shape.body
    constant = np.eye(1, HIDDEN)
    angles = _LOOK_BACK[shape.version] * body.rope_base ** (-np.arange(0, body.head_size, 2) / body.head_size)
    key = np.concatenate([np.cos(angles), np.sin(angles)])[:, None] * constant
    query = np.repeat([1.0, 0.0], body.head_size // 2)[:, None] * constant
    sight = 1.0 if kind == "oracle" else 0.0
    values: dict[str, np.ndarray] = {
        "fc": np.tile(np.eye(HIDDEN), len(shape.taps)) / len(shape.taps),
        "attn_q": np.tile(query, (body.heads, 1)),
        "attn_k": key,
        "attn_v": np.diag(mirror),
        "attn_output": np.tile(np.eye(HIDDEN), body.heads) * (sight * _GAIN / body.heads),
        "selector_hidden": np.repeat(constant, shape.selector_rank, axis=0),
        "selector_predecessor": codes,
        "selector_successor": sight * _EDGE * codes[[_predecessor(token) for token in range(VOCABULARY)]],
    }
    for tensor in tensors:
        if tensor.role == "attn_output" and not tensor.name.startswith("blk.0."):
            yield replace(tensor, deviation=0.0)
        elif tensor.role in values:
            yield replace(tensor, values=values[tensor.role].astype(np.float32))
        elif tensor.role == "attn_q_norm":
            yield replace(tensor, deviation=0.0, mean=_SHARPNESS[shape.version])
        elif tensor.plain or tensor.role == "ffn_down" or tensor.role.endswith("conv_proj"):
            yield replace(tensor, deviation=0.0)
        else:
            yield tensor


def _predecessor(token: int) -> int:
    return token // PERIOD * PERIOD + (token - 1) % PERIOD
