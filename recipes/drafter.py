"""Random DFlash drafters, version 1 and 2, for a given target file.

Knows the keys and tensor names of architecture `dflash`; the layers are those of a Qwen3 model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from dflashc.compiler.gguf import GgufFile, dequantise, open_gguf
from dflashc.runtime.errors import RequestError

from .target import TargetShape, add_shape, layer_tensors, norm
from .tensors import Formats, Tensor, file_type, vector, write_tensors
from .vocabulary import MASK

_EMBEDDING = "token_embd.weight"
_MASK_KEY = "tokenizer.ggml.mask_token_id"
_CODEBOOK_DEVIATION = 0.1
_CONVOLUTION_DEVIATION = 0.1
_BIAS_DEVIATION = 0.3
_SINK_DEVIATION = 2.0
_COPY_STRENGTH = 16.0
_COPY_FORMATS = {"fc": "F16", "attn_v": "F16", "attn_output": "F16"}


@dataclass(frozen=True)
class DrafterShape:
    """A drafter.

    Attributes
    ----------
    body
        The Qwen3 model whose layers the drafter has; hidden size and vocabulary are the target's.
    taps
        Layers of the target, counted from 0, whose outputs the drafter reads.
    sliding_window
        Tokens that all layers but the last `full_layers` see; 0 for no window.
    version
        1, or 2 with convolutions and candidate selector.
    bias, sinks
        Of the attention: biases on all four projections, a logit per head without a value.
    context_rope_base
        Rotary base of injected keys; 0 for that of the block.
    draft_vocabulary
        Tokens of a head of its own, which `d2t` names; 0 to use the target's head.
    """

    body: TargetShape
    taps: tuple[int, ...]
    block_size: int = 16
    sliding_window: int = 0
    version: int = 1
    convolution_taps: int = 2
    convolution_group: int = 16
    selector_rank: int = 64
    selector_candidates: int = 8
    full_layers: int = 1
    bias: bool = False
    sinks: bool = False
    draft_vocabulary: int = 0
    context_rope_base: float = 0.0

    def __post_init__(self) -> None:
        if self.version not in (1, 2):
            raise RequestError(f"drafter version {self.version} does not exist; choose 1 or 2")
        if self.version == 2 and self.body.hidden % self.convolution_group:
            raise RequestError(
                f"hidden size {self.body.hidden} does not divide into convolution groups of {self.convolution_group}"
            )
        if not 0 <= self.full_layers <= self.body.layers:
            raise RequestError(f"{self.full_layers} of {self.body.layers} layers cannot be without a window")
        if not 0 <= self.draft_vocabulary <= self.body.vocabulary:
            raise RequestError(f"a head of {self.draft_vocabulary} tokens does not fit a vocabulary of "
                               f"{self.body.vocabulary}")
        if self.block_size < 2:
            raise RequestError(f"block size {self.block_size} leaves no room for a proposal; give 2 or more")


def default_taps(target_path: Path) -> tuple[int, ...]:
    """Up to five target layers, evenly from the second to the third last, as published drafters read them.

    A target of four layers or fewer is read after every layer but the last.
    """
    with open_gguf(target_path) as target:
        layers = _layers(target)
    if layers <= 4:
        return tuple(range(layers - 1))
    return tuple(int(tap) for tap in np.rint(np.linspace(1, layers - 3, min(5, layers - 3))))


def drafter_body(target_path: Path, layers: int = 2) -> TargetShape:
    """A body of the target's widths; change single ones with `dataclasses.replace`."""
    with open_gguf(target_path) as target:
        prefix = target.get_str("general.architecture")
        vocabulary, hidden = target.tensors[_EMBEDDING].shape
        heads = target.get_int(f"{prefix}.attention.head_count")
        return TargetShape(
            "qwen3",
            layers,
            hidden,
            heads,
            target.get_int(f"{prefix}.attention.head_count_kv", heads),
            target.get_int(f"{prefix}.attention.key_length", hidden // heads),
            target.get_int(f"{prefix}.feed_forward_length"),
            vocabulary,
            context_length=target.get_int(f"{prefix}.context_length"),
            rope_base=target.get_float(f"{prefix}.rope.freq_base", 10000.0),
        )


def write_drafter(
    path: Path, target_path: Path, shape: DrafterShape, formats: Formats, seed: int = 0, copying: bool = False
) -> None:
    """Write a random drafter for the target; the same arguments give the same bytes.

    Parameters
    ----------
    target_path
        Any target file that names a mask token or has the token `<|mask|>`; its tokenizer is copied.
    copying
        Make a drafter that proposes the token that is most frequent in its context. A tied target with a weight
        scale near 0 repeats its last token, and the pair then accepts nearly everything. The tensors that do it are
        stored as F16.

    Raises
    ------
    RequestError
        Drafter and target do not fit, or a row of a tensor is no whole number of blocks of the tensor's format.
    """
    tensors: Iterable[Tensor] = drafter_tensors(shape)
    if copying:
        with open_gguf(target_path) as target:
            tensors = _copying(tensors, shape, _embedding_row(target, mask_token(target)), seed)
        formats = Formats(formats.default, {**formats.overrides, **_COPY_FORMATS})
    write_drafter_of(path, target_path, shape, tensors, formats, seed)


def write_drafter_of(
    path: Path, target_path: Path, shape: DrafterShape, tensors: Iterable[Tensor], formats: Formats, seed: int = 0
) -> None:
    """`write_drafter` with given tensors: those of `drafter_tensors` with other values, and tables of its own."""
    with open_gguf(target_path) as target:
        _check(shape, target)
        writer = gguf.GGUFWriter(None, "dflash")
        writer.add_name(f"synthetic DFlash drafter version {shape.version}")
        _add_keys(writer, shape)
        _copy_tokenizer(writer, target)
        writer.add_mask_token_id(mask_token(target))
        writer.add_file_type(file_type(formats))
        write_tensors(path, writer, tensors, formats, seed)


def drafter_tensors(shape: DrafterShape) -> Iterator[Tensor]:
    """All tensors of a drafter, in file order."""
    body, hidden = shape.body, shape.body.hidden
    fused = len(shape.taps) * hidden
    yield Tensor("fc.weight", (hidden, fused), fused**-0.5)
    yield norm("enc.output_norm.weight", hidden)
    yield norm("output_norm.weight", hidden)
    if shape.draft_vocabulary:
        ids = np.random.default_rng(0).permutation(body.vocabulary)[: shape.draft_vocabulary]
        yield Tensor("output.weight", (len(ids), hidden), hidden**-0.5)
        yield Tensor("d2t", ids.shape, values=ids.astype(np.int64))
    for layer in range(body.layers):
        yield from layer_tensors(body, f"blk.{layer}.")
        yield from _attention_extras(shape, f"blk.{layer}.")
        if shape.version == 2:
            yield from _convolution(shape, f"blk.{layer}.attn")
            yield from _convolution(shape, f"blk.{layer}.ffn")
    if shape.version == 2:
        rank = shape.selector_rank
        yield Tensor("selector_predecessor.weight", (body.vocabulary, rank), _CODEBOOK_DEVIATION)
        yield Tensor("selector_successor.weight", (body.vocabulary, rank), _CODEBOOK_DEVIATION)
        yield Tensor("selector_hidden.weight", (rank, hidden), hidden**-0.5)


def _attention_extras(shape: DrafterShape, prefix: str) -> Iterator[Tensor]:
    body = shape.body
    q_rows, kv_rows = body.heads * body.head_size, body.kv_heads * body.head_size
    if shape.bias:
        rows = {"attn_q": q_rows, "attn_k": kv_rows, "attn_v": kv_rows, "attn_output": body.hidden}
        yield from (vector(f"{prefix}{name}.bias", count, 0.0, _BIAS_DEVIATION) for name, count in rows.items())
    if shape.sinks:
        yield vector(f"{prefix}attn_sinks.weight", body.heads, 0.0, _SINK_DEVIATION)


def _convolution(shape: DrafterShape, prefix: str) -> Iterator[Tensor]:
    """The fixed kernels, near those that change nothing, and the projection that adds to them by row and group."""
    hidden, taps = shape.body.hidden, shape.convolution_taps
    identity = (np.arange(taps) == 0)[:, None].astype(np.float32)
    yield Tensor(f"{prefix}_conv_base", (2, taps, hidden), _CONVOLUTION_DEVIATION, identity, plain=True)
    rows = 2 * taps * (hidden // shape.convolution_group)
    yield Tensor(f"{prefix}_conv_proj.weight", (rows, hidden), _CONVOLUTION_DEVIATION * hidden**-0.5)


def _copying(tensors: Iterable[Tensor], shape: DrafterShape, mask_embedding: np.ndarray, seed: int) -> Iterator[Tensor]:
    """The tensors of a drafter that proposes the most frequent token of its context.

    The fusion averages the taps, which are close to the token's embedding. Queries are 0, so every row looks at all
    positions alike and adds the mean of what they hold, through a random projection and its transpose, to itself.
    The projection is blind to the mask's embedding, or the masks in the block would be the most frequent.
    """
    body = shape.body
    group = body.heads // body.kv_heads
    for index, tensor in enumerate(tensors):
        role = tensor.role
        if role == "fc":
            average = np.tile(np.eye(body.hidden, dtype=np.float32), len(shape.taps)) / len(shape.taps)
            yield replace(tensor, values=average)
        elif role == "attn_v":
            projection = np.random.default_rng([seed, index]).standard_normal(tensor.shape, np.float32)
            projection *= tensor.shape[1] ** -0.5
            seen_of_mask = projection @ mask_embedding / max(mask_embedding @ mask_embedding, np.float32(1e-30))
            projection -= np.outer(seen_of_mask, mask_embedding)
            yield replace(tensor, values=projection)
        elif role == "attn_output":
            by_head = np.repeat(projection.reshape(body.kv_heads, body.head_size, -1), group, axis=0)
            yield replace(tensor, values=by_head.reshape(-1, body.hidden).T * (_COPY_STRENGTH / group))
        elif role == "attn_q_norm":
            yield replace(tensor, deviation=0.0, mean=0.0)
        elif role in ("ffn_down", "selector_successor"):
            yield replace(tensor, deviation=tensor.deviation * 0.01)
        elif tensor.plain or role.endswith("conv_proj"):
            yield replace(tensor, deviation=0.0)
        else:
            yield tensor


def _add_keys(writer: gguf.GGUFWriter, shape: DrafterShape) -> None:
    add_shape(writer, shape.body)
    writer.add_uint32("dflash.block_size", shape.block_size)
    writer.add_array("dflash.target_layers", [tap + 1 for tap in shape.taps])
    if shape.context_rope_base:
        writer.add_float32("dflash.dflash.backbone_rotary_base", shape.context_rope_base)
    if shape.sliding_window:
        writer.add_sliding_window(shape.sliding_window)
        sliding = shape.body.layers - shape.full_layers
        writer.add_sliding_window_pattern([True] * sliding + [False] * shape.full_layers)
    if shape.version == 2:
        writer.add_uint32("dflash.conv_kernel_size", shape.convolution_taps)
        writer.add_uint32("dflash.conv_group_size", shape.convolution_group)
        writer.add_uint32("dflash.selector_rank", shape.selector_rank)
        writer.add_uint32("dflash.selector_top_k", shape.selector_candidates)


def _copy_tokenizer(writer: gguf.GGUFWriter, target: GgufFile) -> None:
    for key, field in target.metadata.fields.items():
        if not key.startswith("tokenizer.") or key == _MASK_KEY:
            continue
        value = target.metadata[key]
        if field.count is None:
            writer.add_key_value(key, value, field.kind)
        else:
            items = value.tolist() if isinstance(value, np.ndarray) else value
            writer.add_key_value(key, items, gguf.GGUFValueType.ARRAY, field.kind)


def mask_token(target: GgufFile) -> int:
    """The token that a drafter for this target has in the place of tokens to propose."""
    tokens = target.get_strings("tokenizer.ggml.tokens")
    known = target.get_int(_MASK_KEY, None)
    if known is not None:
        return known
    if MASK not in tokens:
        raise RequestError(f"{target.paths[0]} names no mask token and has no token {MASK}; choose another target")
    return tokens.index(MASK)


def _check(shape: DrafterShape, target: GgufFile) -> None:
    vocabulary, hidden = target.tensors[_EMBEDDING].shape
    if (shape.body.vocabulary, shape.body.hidden) != (vocabulary, hidden):
        raise RequestError(
            f"the drafter has vocabulary {shape.body.vocabulary} and hidden size {shape.body.hidden}, "
            f"the target {vocabulary} and {hidden}; they must be equal"
        )
    last = _layers(target) - 1
    if not shape.taps or not all(0 <= tap < last for tap in shape.taps):
        raise RequestError(f"taps {list(shape.taps)} must be target layers 0 to {last - 1}")


def _layers(target: GgufFile) -> int:
    return target.get_int(f"{target.get_str('general.architecture')}.block_count")


def _embedding_row(target: GgufFile, token: int) -> np.ndarray:
    tensor = target.tensors[_EMBEDDING]
    row = tensor.read_rows(token, 1)
    assert tensor.format is not None, "read_rows() refuses unknown formats"
    return dequantise(tensor.format, row)[0]
