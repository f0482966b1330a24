"""The project's own Relax operators: their names, constructors and types.

A model's graph is written with the first group and Relax's own add, multiply, reshape, split, silu and gelu_tanh; the
passes replace these with the second group. Operators are packed calls "dflashc.<name>": tensors first, then scalars.
Weights are parameters of their logical type (rows, columns), named as in the GGUF file, whatever their block format.

`attention`, `attention_block`, `cache_write` and `kv_injection` write K and V of their rows into the caches; bindings
run in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

Expr: TypeAlias = Any
"""A `relax.Expr`; its attributes live in TVM's C++, where type checkers do not see them."""
PREFIX = "dflashc."

FORMS: dict[str, tuple[tuple[str, int], ...]] = {
    "f32": (("float32", 1),),
    "q8_32": (("int8", 1), ("float32", 32), ("int32", 32)),
    "q8_256": (("int8", 1), ("float32", 256), ("int16", 16)),
    "q8_32s": (("int8", 1), ("float32", 32), ("int32", 16)),
}
"""Forms of a linear's input: per part (codes, scales, sums) its dtype and how many columns share one element."""


def form_type(form: str, rows: Expr, columns: int) -> relax.Type:
    """The Relax type of a (rows, columns) activation in `form`: a tensor for "f32", else a tuple of its parts."""
    parts = [relax.TensorType((rows, columns // group), dtype) for dtype, group in FORMS[form]]
    return parts[0] if len(parts) == 1 else relax.TupleType(parts)


def form_rows(x: Expr) -> Expr:
    """The row dimension of an activation in any form."""
    first = x.ty.fields[0] if isinstance(x.ty, relax.TupleType) else x.ty
    return first.shape.values[0]


def form_group(form: str) -> int:
    """Columns that share one scale; columns must be a multiple of it."""
    return max(group for _, group in FORMS[form])


def operator(name: str, tensors: Sequence[Expr], scalars: Sequence[str | float | int], result: relax.Type) -> Expr:
    """The call `dflashc.<name>`; scalars become string, float64 or int64 immediates."""
    return relax.op.call_pure_packed(PREFIX + name, *tensors, *(_immediate(s) for s in scalars), ty_args=result)


def _immediate(value: str | float | int) -> Expr:
    if isinstance(value, str):
        return tvm.ir.StringImm(value)
    return tirx.const(value, "float64" if isinstance(value, float) else "int64")


def name_of(value: Expr) -> str:
    """"dflashc.<name>" or "relax.<name>" of a call, "" of anything else."""
    if not isinstance(value, relax.Call):
        return ""
    name = str(getattr(value.op, "name", ""))
    if name == "relax.call_pure_packed":
        return str(value.args[0].global_symbol)
    return name


def operands(value: Expr) -> list[Expr]:
    """The arguments of a call, of ours or of Relax."""
    return list(value.args[1:] if name_of(value).startswith(PREFIX) else value.args)


def is_scalar(value: Expr) -> bool:
    """Whether an operand is an immediate."""
    return isinstance(value, tvm.ir.StringImm | tirx.IntImm | tirx.FloatImm)


def scalar(value: Expr) -> Any:
    """The Python value of an immediate: str, float or int."""
    return value.value


def shape(value: Expr) -> list[Expr | int]:
    """Dimensions of a tensor: int where they are constant, else the symbolic variable."""
    return [int(d) if isinstance(d, tirx.IntImm) else d for d in value.ty.shape.values]


def _like(value: Expr, *dimensions: Expr | int) -> relax.Type:
    return relax.TensorType(tuple(dimensions) or tuple(shape(value)), "float32")


# The model's graph -------------------------------------------------------------------------------------------------


def embed(tokens: Expr, table: Expr, scale: float) -> Expr:
    """Rows of `table` (V, H) for `tokens` int32 (m,), times `scale`: float32 (m, H)."""
    return operator("embed", [tokens, table], [scale], _like(table, shape(tokens)[0], shape(table)[1]))


def linear(x: Expr, weight: Expr) -> Expr:
    """x (m, K) times weight (N, K) transposed: float32 (m, N)."""
    return operator("linear", [x, weight], [], _like(x, shape(x)[0], shape(weight)[0]))


def rms_norm(x: Expr, weight: Expr, epsilon: float) -> Expr:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis."""
    return operator("rms_norm", [x, weight], [epsilon], _like(x))


def rope_table(tokens: Expr, state: Expr, frequencies: Expr, magnitude: float) -> Expr:
    """cos and sin of position * frequency, times `magnitude`: float32 (2, m, n_rot / 2).

    The position of row i is n + i, n = state[0]; `frequencies` float64 (n_rot / 2,); `tokens` gives m.
    """
    return operator("rope_table", [tokens, state, frequencies], [magnitude],
                    relax.TensorType((2, shape(tokens)[0], shape(frequencies)[0]), "float32"))


def rope(x: Expr, table: Expr, pairing: str) -> Expr:
    """Rotate the first n_rot of x (m, heads, D): pairs (i, i + n_rot/2) for "neox", (2i, 2i + 1) for "norm"."""
    return operator("rope", [x, table], [pairing], _like(x))


def attention(q: Expr, k: Expr, v: Expr, sinks: Sequence[Expr], caches: Sequence[Expr], state: Expr, window: int,
              scale: float, mask: str) -> Expr:
    """Attention of q (m, Hq, D) over the cache and the rows' own k, v (m, Hkv, D), which it stores first.

    Row i has position n + i and sees keys at positions p with n + i - p < window (where window > 0), and p <= n + i for
    mask "causal"; for mask "block" all rows see each other: p <= n + m - 1.

    Parameters
    ----------
    sinks : empty, or one logit per query head (Hq,), which takes part in the softmax and has no value
    caches : K cache and V cache
    """
    return operator("attention", [q, k, v, relax.Tuple(list(sinks)), *caches, state], [window, scale, mask], _like(q))


def cache_write(k: Expr, v: Expr, k_cache: Expr, v_cache: Expr, state: Expr) -> Expr:
    """Store k and v (m, Hkv, D) at positions n .. n + m - 1. Returns a token, int64 (1,), that stands for the write."""
    return operator("cache_write", [k, v, k_cache, v_cache, state], [], relax.TensorType((1,), "int64"))


def local_convolution(x: Expr, dynamic: Expr, base: Expr, side: int) -> Expr:
    """DFlash2's convolution over the rows of a block, taps before row 0 being zero: float32 (m, H).

    y[i, c] = sum_t (base[side, t, c] + dynamic[i, side, t, c // group]) * x[i - t, c], `base` (2, taps, H) and
    `dynamic` (m, 2 * taps * H / group), side major.
    """
    return operator("local_convolution", [x, dynamic, base], [side], _like(x))


def select_candidates(logits: Expr, d2t: Sequence[Expr], projected: Expr, tokens: Expr, state: Expr, sampling: Expr,
                      predecessor: Expr, successor: Expr, count: int) -> Expr:
    """DFlash2's candidate selector: a tuple (ids, confidence (m,), candidates, probabilities (m, count)).

    Left to right, row i gives each of its `count` largest logits c, the candidates, the score
    logit + sum_r predecessor[previous, r] * projected[i, r] * successor[c, r]; that before row 0 is tokens[0]. It
    proposes the best one or, where the request's proposals are drawn, one from `probabilities`, softmax(score / T), by
    the random number for position state[0] + state[1] + i + 1; else `probabilities` are 1 for what is proposed. Its
    confidence is the best score's share of softmax(score). Ids are int32, confidence float32, probabilities float64.

    Parameters
    ----------
    d2t : empty where logit c is token c's, or the token of each logit, int32
    sampling : the request's parameters
    """
    rows = shape(logits)[0]
    types = [((rows,), "int32"), ((rows,), "float32"), ((rows, count), "int32"), ((rows, count), "float64")]
    return operator("select_candidates",
                    [logits, relax.Tuple(list(d2t)), projected, tokens, state, sampling, predecessor, successor],
                    [count], relax.TupleType([relax.TensorType(*t) for t in types]))


def best_candidate(logits: Expr, d2t: Sequence[Expr], count: int) -> Expr:
    """The largest logit of each row, the lowest on ties: a tuple (ids int32 (m,), confidence float32 (m,)).

    Its confidence is its share of the softmax over the `count` largest logits. `d2t` as for `select_candidates`.
    """
    rows = shape(logits)[0]
    return operator("best_candidate", [logits, relax.Tuple(list(d2t))], [count],
                    relax.TupleType([relax.TensorType((rows,), "int32"), relax.TensorType((rows,), "float32")]))


def scale(x: Expr, factor: float) -> Expr:
    """factor * x."""
    return operator("scale", [x], [factor], _like(x))


def softcap(x: Expr, cap: float) -> Expr:
    """cap * tanh(x / cap)."""
    return operator("softcap", [x], [cap], _like(x))


def argmax(logits: Expr) -> Expr:
    """Index of the largest logit of each row, the lowest one on ties: int32 (m,)."""
    return operator("argmax", [logits], [], relax.TensorType((shape(logits)[0],), "int32"))


def look_up(indices: Expr, table: Expr) -> Expr:
    """table[indices], both int32: (m,) of `table` (N,)."""
    return operator("look_up", [indices, table], [], relax.TensorType((shape(indices)[0],), "int32"))


# What the passes make of it ----------------------------------------------------------------------------------------


def quantise(x: Expr, form: str) -> Expr:
    """x (m, K) in another form, see `FORMS`."""
    rows, columns = shape(x)
    return operator("quantise", [x], [form], form_type(form, rows, int(columns)))


def linear_group(xs: Sequence[Expr], weights: Sequence[Expr], biases: Sequence[Expr], forms: Sequence[str]) -> Expr:
    """Several linears of one input, side by side: float32 (m, sum of N).

    `xs` holds the input in each of `forms`; every weight reads the form that its block format wants. `biases` is empty
    or has one per weight.
    """
    columns = sum(int(shape(w)[0]) for w in weights)
    return operator("linear_group", [relax.Tuple(list(xs)), relax.Tuple(list(weights)), relax.Tuple(list(biases))],
                    [",".join(forms)], relax.TensorType((form_rows(xs[0]), columns), "float32"))


def gated_linear(x: Expr, gate: Expr, up: Expr, activation: str, form: str, result: str) -> Expr:
    """activation(gate x) * (up x); x comes in `form`, the product leaves in form `result`.

    `activation` is "silu" or "gelu_tanh".
    """
    return operator("gated_linear", [x, gate, up], [activation, form, result],
                    form_type(result, form_rows(x), int(shape(gate)[0])))


def gated(y: Expr, activation: str, result: str) -> Expr:
    """activation(left half of y) * (right half of y), y (m, 2 F), in form `result`: for weights of unlike formats."""
    rows, columns = shape(y)
    return operator("gated", [y], [activation, result], form_type(result, rows, int(columns) // 2))


def norm(x: Expr, delta: Expr | None, post_weight: Expr | None, weight: Expr | None, epsilon: float,
         forms: Sequence[str]) -> Expr:
    """Residual add and norm in one: a tuple (x', rms_norm(x', weight) in forms[0], in forms[1], …).

    x' = x + delta, or x + rms_norm(delta, post_weight), or x where there is no delta. Without forms there is no norm,
    and `weight` is None.
    """
    rows, columns = shape(x)
    parts = [relax.Tuple([] if e is None else [e]) for e in (delta, post_weight, weight)]
    results = [_like(x), *(form_type(f, rows, int(columns)) for f in forms)]
    return operator("norm", [x, *parts], [epsilon, ",".join(forms)], relax.TupleType(results))


def attention_block(qkv: Expr, norms: Sequence[Expr], sinks: Sequence[Expr], table: Expr, caches: Sequence[Expr],
                    state: Expr, heads: tuple[int, int, int], pairing: str, window: int, scale: float, mask: str,
                    epsilon: float, form: str) -> Expr:
    """From q | k | v side by side to the attention's output in `form`: head norms, rope, cache write, attention.

    Parameters
    ----------
    qkv : float32 (m, (Hq + 2 Hkv) D)
    norms : empty, or the q and k norm weights (D,)
    sinks, caches : as of `attention`
    heads : Hq, Hkv, D
    epsilon : of the head norms
    """
    rows = shape(qkv)[0]
    return operator("attention_block", [qkv, *(relax.Tuple(list(g)) for g in (norms, sinks)), table, *caches, state],
                    [*heads, pairing, window, scale, mask, epsilon, form], form_type(form, rows, heads[0] * heads[2]))


def linear_argmax(x: Expr, weight: Expr, d2t: Sequence[Expr], form: str) -> Expr:
    """`argmax` of `linear`, without the logits in between; x comes in `form`: int32 (m,).

    `d2t` is empty, or holds the table (N,) in which the result is looked up.
    """
    return operator("linear_argmax", [x, weight, relax.Tuple(list(d2t))], [form],
                    relax.TensorType((form_rows(x),), "int32"))


def features(taps: Sequence[Expr], form: str) -> Expr:
    """The taps (m, Ht) side by side, in `form`: what the drafter's fusion reads."""
    columns = sum(int(shape(t)[1]) for t in taps)
    return operator("features", [relax.Tuple(list(taps))], [form], form_type(form, shape(taps[0])[0], columns))


def kv_injection(xs: Sequence[Expr], weights: Sequence[Expr], biases: Sequence[Expr], norms: Sequence[Expr],
                 table: Expr, caches: Sequence[Expr], state: Expr, kv_heads: int, size: int, pairing: str,
                 epsilon: float, forms: Sequence[str]) -> Expr:
    """K and V of all drafter layers from the context features, into their caches. Returns a token.

    Parameters
    ----------
    xs : the context features in each of `forms`; every weight reads the one that its block format wants
    weights : K and V projections of layer 0, of layer 1, …
    biases : empty, or one per weight; added before the norm
    norms : K head norm of each layer, (D,)
    caches : K and V cache of layer 0, of layer 1, …
    """
    groups = [relax.Tuple(list(g)) for g in (xs, weights, biases, norms)]
    return operator("kv_injection", [*groups, table, relax.Tuple(list(caches)), state],
                    [kv_heads, size, pairing, epsilon, ",".join(forms)], relax.TensorType((1,), "int64"))


def convolution_linear(u: Expr, x: Expr, weight: Expr, base: Expr, form: str, result: str) -> Expr:
    """A block's dynamic weights and its convolution before the sublayer, in one: the tuple (y in `result`, dynamic).

    `u` (m, H) is the normed input, x the same in `form`, which `weight` (2 * taps * groups, H) reads; y is the side 0
    convolution of u, `dynamic` (m, taps * groups) the dynamic weights of side 1.
    """
    rows, columns = shape(u)
    dynamic = relax.TensorType((rows, int(shape(weight)[0]) // 2), "float32")
    return operator("convolution_linear", [u, x, weight, base], [form, result],
                    relax.TupleType([form_type(result, rows, int(columns)), dynamic]))


def convolution_out(z: Expr, dynamic: Expr, base: Expr) -> Expr:
    """The side 1 convolution of a sublayer's output z (m, H), with the `dynamic` weights of `convolution_linear`."""
    return operator("convolution_out", [z, dynamic, base], [], _like(z))


def norm_convolution(x: Expr, z: Expr, dynamic: Expr, base: Expr, weight: Expr | None, epsilon: float,
                     forms: Sequence[str]) -> Expr:
    """`norm` whose delta is `convolution_out(z, dynamic, base)`: the tuple (x', rms_norm(x', weight) in each form)."""
    rows, columns = shape(x)
    results = [_like(x), *(form_type(f, rows, int(columns)) for f in forms)]
    return operator("norm_convolution", [x, z, dynamic, base, relax.Tuple([] if weight is None else [weight])],
                    [epsilon, ",".join(forms)], relax.TupleType(results))


def draw(logits: Expr, tokens: Expr, state: Expr, history: Expr, sampling: Expr) -> Expr:
    """The token that the request's sampler draws from each row of `logits` (m, V), int32 (m,); -1 if none is finite.

    Row i decides position n + first + i + 1, n = state[0], first = state[1] the row of the run that is row 0 here. What
    came before are `history` (context,) up to position n and the run's rows of `tokens`. `sampling` holds the request's
    parameters. The logits are overwritten with penalised ones.
    """
    return operator("draw", [logits, tokens, state, history, sampling], [],
                    relax.TensorType((shape(logits)[0],), "int32"))


def judge(logits: Expr, tokens: Expr, state: Expr, history: Expr, sampling: Expr, candidates: Expr,
          probabilities: Expr) -> Expr:
    """`draw`, but where the request's proposals are drawn, rows with a proposal behind them do rejection sampling.

    Row i < m - 1 judges tokens[i + 1], which was drawn from row i of `probabilities` (…, count) over `candidates`: it
    gives that token with probability min(1, p / q), else one drawn from max(p - q, 0), or from p where that is nothing;
    p is the law that `draw` draws from.
    """
    return operator("judge", [logits, tokens, state, history, sampling, candidates, probabilities], [],
                    relax.TensorType((shape(logits)[0],), "int32"))


def accept(tokens: Expr, ids: Expr, state: Expr, block: Expr, history: Expr) -> Expr:
    """Acceptance of the proposals tokens[1:] (m,) by the target's choices `ids` (m,); int32 (m + 1,), see below.

    With k the length of the longest prefix whose tokens[i + 1] == ids[i]: the result is k, the k accepted tokens and
    ids[k]; tokens[: k + 1] are committed, that is written to `history` at position state[0], which grows by k + 1; and
    ids[k] becomes the anchor, tokens[0] and block[0].
    """
    rows = shape(tokens)[0]
    return operator("accept", [tokens, ids, state, block, history], [], relax.TensorType((rows + 1,), "int32"))
