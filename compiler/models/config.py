"""A model's configuration, read from GGUF metadata and checked before anything is built.

Owns the keys that all decoder architectures share; what an architecture does differently stays in its own file.
Knows nothing of Relax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dflashc.compiler.gguf import GgufFile, GgufTensor
from dflashc.runtime.errors import BuildError

MAX_LAYERS = 1024
MAX_DIMENSION = 1 << 20
MAX_HEAD_SIZE = 1024
MAX_CONTEXT = 1 << 24


@dataclass(frozen=True)
class Rope:
    """One kind of rotary embedding.

    Attributes
    ----------
    name : str
        Names the frequency table, e.g. "global".
    frequencies : tuple of float
        Radians per position of each pair; n_rot / 2 of them, in float64.
    magnitude : float
        Factor of cos and sin (YaRN's attention factor), 1 otherwise.
    pairing : str
        "neox": pairs (i, i + n_rot/2); "norm": pairs (2i, 2i + 1).
    """

    name: str
    frequencies: tuple[float, ...]
    magnitude: float
    pairing: str


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense decoder; sizes in elements, windows in tokens (0 = the whole context)."""

    architecture: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context_length: int
    epsilon: float
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    layer_windows: tuple[int, ...]
    attention_scale: float
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0


def read_config(gguf: GgufFile, *, pairing: str, embedding_scale: float = 1.0) -> ModelConfig:
    """The configuration of a decoder whose layers are all alike: full attention, one rope.

    Raises `BuildError` for values that no model has or that the kernels cannot serve, `GgufError` for missing keys.
    """
    a = gguf.get_str("general.architecture")
    layers = read_count(gguf, f"{a}.block_count", MAX_LAYERS)
    hidden = read_count(gguf, f"{a}.embedding_length", MAX_DIMENSION)
    heads = read_count(gguf, f"{a}.attention.head_count", 1024)
    kv_heads = gguf.get_int(f"{a}.attention.head_count_kv", default=heads)
    head_size = read_count(gguf, f"{a}.attention.key_length", MAX_HEAD_SIZE, default=hidden // heads)
    value_size = gguf.get_int(f"{a}.attention.value_length", default=head_size)
    if head_size != value_size:
        raise BuildError(f"{a}.attention.value_length is {value_size}, key_length {head_size}: "
                         "heads of unlike key and value sizes are not supported")
    if not 0 < kv_heads <= heads or heads % kv_heads:
        raise BuildError(f"{a}.attention.head_count_kv is {kv_heads}; expected a divisor of head_count, {heads}")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise BuildError("tensor token_embd.weight not found; this file is not a whole model")
    return ModelConfig(
        architecture=a, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_size=head_size,
        feed_forward=read_count(gguf, f"{a}.feed_forward_length", MAX_DIMENSION),
        vocabulary=embedding.shape[0],
        context_length=read_count(gguf, f"{a}.context_length", MAX_CONTEXT),
        epsilon=read_positive(gguf, f"{a}.attention.layer_norm_rms_epsilon"),
        ropes=(read_rope(gguf, "global", pairing, head_size),),
        layer_ropes=(0,) * layers, layer_windows=(0,) * layers,
        attention_scale=read_positive(gguf, f"{a}.attention.scale", default=1.0 / math.sqrt(head_size)),
        embedding_scale=embedding_scale,
        logit_softcap=read_positive(gguf, f"{a}.final_logit_softcapping", default=0.0),
    )


def read_rope(gguf: GgufFile, name: str, pairing: str, head_size: int, *, base_key: str = "rope.freq_base",
              default_base: float = 10000.0, scaled: bool = True) -> Rope:
    """A rotary embedding with its scaling resolved to plain frequencies.

    Kinds: none, linear, yarn (Peng et al. 2023, "YaRN", section 3), and per-pair divisors in the tensor
    `rope_freqs.weight` (Llama 3). `scaled` false leaves all scaling out.
    """
    a = gguf.get_str("general.architecture")
    rotated = gguf.get_int(f"{a}.rope.dimension_count", default=head_size)
    if not 0 < rotated <= head_size or rotated % 2:
        raise BuildError(f"{a}.rope.dimension_count is {rotated}; expected an even number up to {head_size}")
    base = read_positive(gguf, f"{a}.{base_key}", default=default_base)
    frequencies = base ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    magnitude = 1.0
    if scaled:
        frequencies, magnitude = _scaled(gguf, frequencies, base)
        divisors = gguf.tensors.get("rope_freqs.weight")
        if divisors is not None:
            frequencies = frequencies / _divisors(divisors, frequencies.size)
    return Rope(name, tuple(float(f) for f in frequencies), magnitude, pairing)


def _scaled(gguf: GgufFile, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
    """Frequencies and magnitude by the file's scaling keys; a factor without a kind means linear, as in older files."""
    scaling = f"{gguf.get_str('general.architecture')}.rope.scaling"
    kind = gguf.get_str(f"{scaling}.type", default="linear")
    if kind == "none":
        return frequencies, 1.0
    if kind not in ("linear", "yarn"):
        raise BuildError(f"{scaling}.type is {kind!r}; supported: none, linear, yarn")
    factor = read_positive(gguf, f"{scaling}.factor", default=1.0)
    if kind == "linear":
        return frequencies / factor, 1.0
    if base <= 1:
        raise BuildError(f"rope.freq_base is {base}; yarn scaling needs more than 1")
    original = read_count(gguf, f"{scaling}.original_context_length", MAX_CONTEXT)
    beta_fast = read_positive(gguf, f"{scaling}.yarn_beta_fast", default=32.0)
    beta_slow = read_positive(gguf, f"{scaling}.yarn_beta_slow", default=1.0)
    magnitude = read_positive(gguf, f"{scaling}.attn_factor", default=1.0) * (1.0 + 0.1 * math.log(factor))
    return yarn_frequencies(frequencies, base, 2 * frequencies.size, factor, original, beta_fast, beta_slow), magnitude


def _divisors(tensor: GgufTensor, pairs: int) -> np.ndarray:
    """The values of `rope_freqs.weight`, float64 (pairs,)."""
    if math.prod(tensor.shape) != pairs:
        raise BuildError(f"tensor rope_freqs.weight has shape {tensor.shape}; expected {pairs} entries")
    values = tensor.dequantise().astype(np.float64).reshape(-1)
    if not (np.isfinite(values) & (values > 0)).all():
        raise BuildError("tensor rope_freqs.weight has entries that are not positive numbers")
    return values


def yarn_frequencies(frequencies: np.ndarray, base: float, rotated: int, factor: float, original: int,
                     beta_fast: float = 32.0, beta_slow: float = 1.0) -> np.ndarray:
    """Blend interpolated and plain frequencies by wavelength (YaRN, Peng et al. 2023, section 3.2).

    Pairs that turn more than `beta_fast` times within the original context keep their frequency, those that turn less
    than `beta_slow` times are divided by `factor`, with a linear ramp in between.
    """

    def pair(turns: float) -> float:
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair(beta_fast)), 0)
    high = min(math.ceil(pair(beta_slow)), rotated - 1)
    ramp = np.clip((np.arange(rotated // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return frequencies / factor * ramp + frequencies * (1.0 - ramp)


def read_count(gguf: GgufFile, key: str, limit: int, default: int | None = None) -> int:
    """An integer from 1 to `limit`."""
    value = gguf.get_int(key) if default is None else gguf.get_int(key, default=default)
    if not 0 < value <= limit:
        raise BuildError(f"{key} is {value}; expected 1 to {limit}")
    return value


def read_positive(gguf: GgufFile, key: str, default: float | None = None) -> float:
    """A finite number above 0, or `default` where the file has none."""
    if default is not None and key not in gguf.metadata:
        return default
    value = gguf.get_float(key)
    if not 0 < value < math.inf:
        raise BuildError(f"{key} is {value}; expected a positive number")
    return value


def require_in_layers(gguf: GgufFile, config: ModelConfig, *names: str) -> None:
    """Raise `BuildError` unless every layer has the tensors `names`, for what the graph takes as optional."""
    for number in range(config.layers):
        for name in names:
            if f"blk.{number}.{name}" not in gguf.tensors:
                raise BuildError(f"tensor blk.{number}.{name} not found; architecture {config.architecture} needs it")
