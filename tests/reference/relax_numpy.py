"""Evaluates the project's Relax functions in NumPy: every operator by its definition, binding after binding.

The oracle of the passes: a rewritten function must compute what it computed before. Knows nothing of kernels or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from dflashc.passes.operators import FORMS
from tests.reference import functions


def evaluate(
    function: relax.Function,
    inputs: Mapping[str, Any],
    forms: Mapping[str, str] | None = None,
    dtype: type[np.floating] = np.float64,
) -> Any:
    """Run a straight-line function.

    Parameters
    ----------
    inputs
        Per parameter name an array, or for a quantised activation the tuple of its parts. Caches, those of float16 in
        the function's type, may be of any float type; they are updated in place and rounded to their type.
    forms
        The activation form that each weight reads, by name; for linear groups that are given several.
    dtype
        Type that everything else of floating point is computed in.

    Returns
    -------
    The function's result: an array, or a tuple of results. A quantised activation is the tuple of its parts.
    """
    state = _State(forms or {}, dtype)
    for parameter in function.params:
        value = inputs[parameter.name]
        _match_shape(state.sizes, parameter.name, parameter.ty, value)
        is_cache = isinstance(parameter.ty, relax.TensorType) and parameter.ty.dtype == "float16"
        state.values[parameter] = value if is_cache else _as_type(value, dtype)
    for block in function.body.blocks:
        for binding in block.bindings:
            state.values[binding.var] = state.value(binding.value)
    return state.value(function.body.body)


def _match_shape(sizes: dict[Any, int], name: str, expected: relax.Type, value: Any) -> None:
    """Check an input against its parameter's type; a symbolic dimension gets its value at its first use."""
    if isinstance(expected, relax.TupleType):
        for part_type, part in zip(expected.fields, value, strict=True):
            _match_shape(sizes, name, part_type, part)
        return
    for dimension, size in zip(expected.shape.values, value.shape, strict=True):
        count = int(dimension) if isinstance(dimension, tirx.IntImm) else sizes.setdefault(dimension, size)
        assert size == count, f"{name} has shape {value.shape}; expected {count} for {dimension}"


class _State:
    """Values of the variables so far, and of the symbolic dimensions."""

    def __init__(self, forms: Mapping[str, str], dtype: type[np.floating]) -> None:
        self.forms = forms
        self.dtype = dtype
        self.sizes: dict[Any, int] = {}
        self.values: dict[Any, Any] = {}

    def value(self, expr: Any) -> Any:
        if isinstance(expr, relax.Var):
            return self.values[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self.value(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.ShapeExpr):
            return tuple(int(d) if isinstance(d, tirx.IntImm) else self.sizes[d] for d in expr.values)
        if isinstance(expr, relax.Call):
            return self.call(expr)
        return expr.value.numpy() if isinstance(expr.value, tvm.runtime.Tensor) else expr.value

    def call(self, call: Any) -> Any:
        result: Any
        if call.op.name == "relax.call_pure_packed":
            operator, *arguments = call.args
            if operator.global_symbol == "dflashc.linear_group":
                result = self.linear_group(*arguments)
            elif operator.global_symbol == "dflashc.kv_injection":
                xs, weights, *others, forms = arguments
                result = _kv_injection(self.inputs_of(xs, weights, forms), *map(self.value, [weights, *others]))
            else:
                result = OPERATORS[operator.global_symbol](*map(self.value, arguments))
        elif call.op.name == "relax.split":
            result = tuple(np.split(self.value(call.args[0]), [int(i) for i in call.attrs.indices_or_sections], -1))
        else:
            result = RELAX[call.op.name](*map(self.value, call.args))
        return _as_type(result, self.dtype)

    def inputs_of(self, xs: relax.Tuple, weights: relax.Tuple, forms: Any) -> list[np.ndarray]:
        """What each weight reads: the one form there is, or the one that it is known to want."""
        names = self.value(forms).split(",")
        dense = dict(zip(names, map(dequantise, self.value(xs), names), strict=True))
        return [dense[names[0] if len(names) == 1 else self.forms[w.name]] for w in weights]

    def linear_group(self, xs: relax.Tuple, weights: relax.Tuple, biases: relax.Tuple, forms: Any) -> np.ndarray:
        """Linears side by side."""
        inputs = self.inputs_of(xs, weights, forms)
        outputs = [x @ self.value(w).T for x, w in zip(inputs, weights, strict=True)]
        if len(biases):
            outputs = [y + b for y, b in zip(outputs, self.value(biases), strict=True)]
        return np.concatenate(outputs, axis=-1)


def _as_type(value: Any, dtype: type[np.floating]) -> Any:
    if isinstance(value, tuple):
        return tuple(_as_type(part, dtype) for part in value)
    return value.astype(dtype) if value.dtype.kind == "f" else value


# Activation forms --------------------------------------------------------------------------------------------------


def quantise(x: np.ndarray, form: str) -> Any:
    """x (m, K) in a form: as it is for "f32", else codes, scales and sums.

    scale = max|x| / 127 over a group of neighbours, code = x / scale rounded half to even, sums over some codes each;
    `FORMS` has the sizes of the groups.
    """
    if form == "f32":
        return x
    (_, group), (dtype, sum_group) = FORMS[form][1:]
    groups = x.reshape(len(x), -1, group)
    scale = np.abs(groups).max(axis=-1) / 127
    codes = np.rint(groups / np.where(scale == 0, 1, scale)[..., None]).astype(np.int8).reshape(x.shape)
    sums = codes.reshape(len(x), -1, sum_group).sum(axis=-1)
    return codes, scale, sums.astype(dtype)


def dequantise(x: Any, form: str) -> np.ndarray:
    """What a linear reads: codes times scales."""
    if form == "f32":
        return x
    codes, scale, sums = x
    (_, group), (_, sum_group) = FORMS[form][1:]
    assert scale.shape == (len(codes), codes.shape[1] // group)
    assert (sums == codes.reshape(len(codes), -1, sum_group).sum(axis=-1)).all()
    return codes * np.repeat(scale, group, axis=1)


# The operators, by the formulas of `dflashc.passes.operators` ------------------------------------------------------


def _rope_table(tokens: np.ndarray, state: np.ndarray, frequencies: np.ndarray, magnitude: float) -> np.ndarray:
    angles = (state[0] + np.arange(len(tokens)))[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)]) * magnitude


def _rope(x: np.ndarray, table: np.ndarray, pairing: str) -> np.ndarray:
    cosine, sine = table[:, :, None]
    pairs = cosine.shape[-1]
    first, second = {
        "neox": (slice(0, pairs), slice(pairs, 2 * pairs)),
        "norm": (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)),
    }[pairing]
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cosine - x[..., second] * sine
    rotated[..., second] = x[..., second] * cosine + x[..., first] * sine
    return rotated


def _cache_write(
    k: np.ndarray, v: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, state: np.ndarray
) -> np.ndarray:
    start, end = int(state[0]), int(state[0]) + len(k)
    assert end <= k_cache.shape[1], f"{end} positions do not fit a cache of {k_cache.shape[1]}"
    k_cache[:, start:end], v_cache[:, start:end] = k.swapaxes(0, 1), v.swapaxes(0, 1)
    return np.zeros(1, np.int64)


def _attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    sinks: tuple,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    state: np.ndarray,
    window: int,
    scale: float,
    mask: str,
) -> np.ndarray:
    _cache_write(k, v, k_cache, v_cache, state)
    start, end = int(state[0]), int(state[0]) + len(q)
    distance = np.arange(start, end)[:, None] - np.arange(end)
    visible = ((distance >= 0) | (mask == "block")) & ((distance < window) | (window == 0))
    keys, values = (cache[:, :end].swapaxes(0, 1).astype(q.dtype) for cache in (k_cache, v_cache))
    return functions.attention(q, keys, values, visible, scale, *sinks).reshape(q.shape)


def _gated_linear(x: Any, gate: np.ndarray, up: np.ndarray, activation: str, form: str, result: str) -> Any:
    dense = dequantise(x, form)
    return quantise(ACTIVATIONS[activation](dense @ gate.T) * (dense @ up.T), result)


def _gated(y: np.ndarray, activation: str, result: str) -> Any:
    left, right = np.split(y, 2, axis=-1)
    return quantise(ACTIVATIONS[activation](left) * right, result)


def _norm(x: np.ndarray, delta: tuple, post_weight: tuple, weight: tuple, epsilon: float, forms: str) -> tuple:
    for d in delta:
        x = x + (functions.rms_norm(d, post_weight[0], epsilon) if post_weight else d)
    names = forms.split(",") if forms else []
    assert bool(names) == bool(weight)
    return (x, *(quantise(functions.rms_norm(x, weight[0], epsilon), form) for form in names))


def _attention_block(
    qkv: np.ndarray,
    norms: tuple,
    sinks: tuple,
    table: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    state: np.ndarray,
    heads: int,
    kv_heads: int,
    head_size: int,
    pairing: str,
    window: int,
    scale: float,
    mask: str,
    epsilon: float,
    form: str,
) -> Any:
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_size
    q, k, v = np.split(qkv.reshape(len(qkv), -1, head_size), [heads, heads + kv_heads], axis=1)
    if norms:
        q, k = functions.rms_norm(q, norms[0], epsilon), functions.rms_norm(k, norms[1], epsilon)
    q, k = _rope(q, table, pairing), _rope(k, table, pairing)
    output = _attention(q, k, v, sinks, k_cache, v_cache, state, window, scale, mask)
    return quantise(output.reshape(len(qkv), -1), form)


def _features(taps: tuple, form: str) -> Any:
    return quantise(np.concatenate(taps, axis=-1), form)


def _kv_injection(
    dense: Sequence[np.ndarray],
    weights: tuple,
    biases: tuple,
    norms: tuple,
    table: np.ndarray,
    caches: tuple,
    state: np.ndarray,
    kv_heads: int,
    head_size: int,
    pairing: str,
    epsilon: float,
) -> np.ndarray:
    assert len(weights) == len(caches) == 2 * len(norms)
    for layer, norm in enumerate(norms):
        k, v = ((dense[i] @ weights[i].T + (biases[i] if biases else 0)).reshape(-1, kv_heads, head_size)
                for i in (2 * layer, 2 * layer + 1))
        k = _rope(functions.rms_norm(k, norm, epsilon), table, pairing)
        _cache_write(k, v, caches[2 * layer], caches[2 * layer + 1], state)
    return np.zeros(1, np.int64)


def _convolve(x: np.ndarray, dynamic: np.ndarray, base: np.ndarray) -> np.ndarray:
    """y[i] = sum over t of (base[t] + dynamic[i, t]) * x[i - t]; `base` (taps, H), `dynamic` (m, taps * groups)."""
    rows, columns = x.shape
    taps = len(base)
    dynamic = dynamic.reshape(rows, taps, -1)
    y = np.zeros_like(x)
    for row in range(rows):
        for tap in range(min(taps, row + 1)):
            y[row] += (base[tap] + np.repeat(dynamic[row, tap], columns // dynamic.shape[2])) * x[row - tap]
    return y


def _local_convolution(x: np.ndarray, dynamic: np.ndarray, base: np.ndarray, side: int) -> np.ndarray:
    return _convolve(x, np.split(dynamic, 2, axis=-1)[side], base[side])


def _convolution_linear(u: np.ndarray, x: Any, weight: np.ndarray, base: np.ndarray, form: str, result: str) -> tuple:
    before, after = np.split(dequantise(x, form) @ weight.T, 2, axis=-1)
    return quantise(_convolve(u, before, base[0]), result), after


def _convolution_out(z: np.ndarray, dynamic: np.ndarray, base: np.ndarray) -> np.ndarray:
    return _convolve(z, dynamic, base[1])


def _norm_convolution(
    x: np.ndarray, z: np.ndarray, dynamic: np.ndarray, base: np.ndarray, weight: tuple, epsilon: float, forms: str
) -> tuple:
    return _norm(x, (_convolution_out(z, dynamic, base),), (), weight, epsilon, forms)


def _select_candidates(
    logits: np.ndarray,
    d2t: tuple,
    projected: np.ndarray,
    tokens: np.ndarray,
    state: np.ndarray,
    sampling: np.ndarray,
    predecessor: np.ndarray,
    successor: np.ndarray,
    count: int,
) -> tuple[np.ndarray, ...]:
    """Greedy: among equals the lowest id is the better candidate, and the better candidate wins."""
    assert not sampling.any()
    chosen, previous, laws = [], tokens[0], []
    for row, scores in enumerate(logits):
        candidates = _largest(scores, count)
        named = d2t[0][candidates] if d2t else candidates
        scores = scores[candidates] + (predecessor[previous] * projected[row] * successor[named]).sum(axis=-1)
        place = scores.argmax()
        previous = named[place]
        laws.append((_confidence(scores), named, np.eye(len(named))[place]))
        chosen.append(previous)
    confidence, candidates, probabilities = (np.array(x) for x in zip(*laws, strict=True))
    return np.array(chosen, np.int32), confidence, candidates.astype(np.int32), probabilities


def _best_candidate(logits: np.ndarray, d2t: tuple, count: int) -> tuple[np.ndarray, np.ndarray]:
    best = logits.argmax(axis=-1).astype(np.int32)
    confidence = [_confidence(row[_largest(row, count)]) for row in logits]
    return d2t[0][best] if d2t else best, np.array(confidence)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, the largest value first and the lower index among equals."""
    return np.lexsort((np.arange(len(values)), -values))[:count]


def _confidence(scores: np.ndarray) -> float:
    """The largest share of a softmax."""
    return 1 / np.exp(scores - scores.max()).sum()


def _linear_argmax(x: Any, weight: np.ndarray, d2t: tuple, form: str) -> np.ndarray:
    best = (dequantise(x, form) @ weight.T).argmax(axis=-1).astype(np.int32)
    return d2t[0][best] if d2t else best


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": functions.silu,
    "gelu_tanh": functions.gelu_tanh,
}

OPERATORS: dict[str, Callable[..., Any]] = {
    "dflashc.embed": lambda tokens, table, scale: table[tokens] * scale,
    "dflashc.linear": lambda x, weight: x @ weight.T,
    "dflashc.rms_norm": functions.rms_norm,
    "dflashc.rope_table": _rope_table,
    "dflashc.rope": _rope,
    "dflashc.attention": _attention,
    "dflashc.cache_write": _cache_write,
    "dflashc.local_convolution": _local_convolution,
    "dflashc.select_candidates": _select_candidates,
    "dflashc.best_candidate": _best_candidate,
    "dflashc.scale": lambda x, factor: x * factor,
    "dflashc.softcap": functions.softcap,
    "dflashc.argmax": lambda logits: logits.argmax(axis=-1).astype(np.int32),
    "dflashc.quantise": quantise,
    "dflashc.gated_linear": _gated_linear,
    "dflashc.gated": _gated,
    "dflashc.norm": _norm,
    "dflashc.attention_block": _attention_block,
    "dflashc.look_up": lambda indices, table: table[indices],
    "dflashc.linear_argmax": _linear_argmax,
    "dflashc.features": _features,
    "dflashc.convolution_linear": _convolution_linear,
    "dflashc.convolution_out": _convolution_out,
    "dflashc.norm_convolution": _norm_convolution,
}

RELAX: dict[str, Callable[..., Any]] = {
    "relax.add": np.add,
    "relax.multiply": np.multiply,
    "relax.reshape": np.reshape,
    "relax.nn.silu": functions.silu,
    "relax.nn.gelu_tanh": functions.gelu_tanh,
}
