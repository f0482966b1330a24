"""The next token from the logits: llama.cpp's chain of filters, and draws that can be repeated.

Owns the law a token is drawn from and the random numbers, which are keyed by what they are for, so that drafting and
verification can share them. Knows nothing of models or text.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dflashc.runtime.errors import RequestError

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]


class Purpose(IntEnum):
    """What a random number decides. Each purpose has its own stream at every position."""

    SAMPLE = 0
    """The next token, without speculation."""
    DRAFT = 1
    """A proposal of the drafter."""
    ACCEPT = 2
    """Whether a proposal is kept."""
    RESAMPLE = 3
    """The token in place of a refused proposal."""


# The range of every parameter: lowest and highest value, both allowed.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "repeat_last_n": (-1, 2**31 - 1),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "seed": (0, 2**64 - 1),
}


@dataclass(frozen=True)
class SamplingParameters:
    """How a token is chosen. The defaults are llama.cpp's.

    Attributes
    ----------
    temperature : the logits are divided by it; 0 takes the likeliest token (the lowest id among equals).
    top_k : keep that many of the likeliest tokens; 0 keeps all.
    top_p : keep the likeliest tokens until their probabilities sum up to it; 1 keeps all.
    min_p : keep tokens at least this likely relative to the likeliest; 0 keeps all.
    repeat_penalty : divide positive and multiply negative logits of recent tokens by it; 1 is off.
    repeat_last_n : how many recent tokens the three penalties look at; 0 none, -1 all.
    frequency_penalty : take off a recent token's logit, once per occurrence.
    presence_penalty : take off a recent token's logit, once.
    seed : of the random numbers; None draws one.

    Raises
    ------
    RequestError
        A value is not a number or out of its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(32))
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = _RANGES[field.name]
            kinds = int | float if isinstance(field.default, float) else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                kind = "a number" if isinstance(field.default, float) else "a whole number"
                raise RequestError(f"{field.name} is {value!r}, expected {kind} from {low} to {high}")

    @property
    def is_penalised(self) -> bool:
        """Whether recent tokens' logits change."""
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0) and self.repeat_last_n != 0

    @property
    def is_plain_argmax(self) -> bool:
        """Whether the next token is the arg-max of the logits as they are."""
        return self.temperature == 0 and not self.is_penalised


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """Return the random number in [0, 1) that decides `purpose` at `position`.

    It depends on these three arguments alone, not on what was drawn before: the upper 53 bits of the first word that
    Philox 4x64-10 (Salmon et al., 2011) gives for the key (seed, purpose) and the counter (1, position, 0, 0).

    Parameters
    ----------
    seed : 0 .. 2**64 - 1.
    position : absolute position in the context of the token that is decided.
    """
    key = np.array((seed, purpose), np.uint64)
    counter = np.array((0, position, 0, 0), np.uint64)  # NumPy counts up before it takes a block
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def probabilities(logits: Logits, history: Sequence[int], parameters: SamplingParameters) -> tuple[Ids, Probabilities]:
    """Return the law of the next token: ids, likeliest first (lower ids first among equals), and probabilities.

    Filters act in llama.cpp's order: penalties, top-k, top-p, min-p, temperature. Each sees what the one before
    left, and none leaves nothing.

    Parameters
    ----------
    logits : [vocabulary], as the model gives them.
    history : ids of the context, the last one last, for the penalties.

    Raises
    ------
    RequestError
        A logit is NaN or +inf, or all are -inf: the model or its input is broken.
    """
    logits = _penalised(_checked(logits), history, parameters)
    ids = _likeliest(logits, 1 if parameters.temperature == 0 else parameters.top_k)
    kept = logits[ids].astype(np.float64)
    kept = kept[: _top_p_count(kept, parameters.top_p)]
    if parameters.min_p > 0:
        kept = kept[kept >= kept[0] + math.log(parameters.min_p)]
    ids = ids[: len(kept)]
    with np.errstate(over="ignore"):  # the lowest temperatures send all but the likeliest to -inf, as they should
        return ids, _softmax((kept - kept[0]) / (parameters.temperature or 1.0))


def draw(ids: Ids, law: Probabilities, number: float) -> int:
    """Return the id whose share of [0, 1), in the order given, holds `number`."""
    shares = np.cumsum(law)
    index = np.searchsorted(shares, number * shares[-1], side="right")
    last = np.searchsorted(shares, shares[-1], side="left")  # behind it, shares are empty
    return int(ids[min(index, last)])


def sample(logits: Logits, history: Sequence[int], position: int, parameters: SamplingParameters) -> int:
    """Return the token at `position`: the draw of `Purpose.SAMPLE` from the law of `probabilities`."""
    ids, law = probabilities(logits, history, parameters)
    if len(ids) == 1:
        return int(ids[0])
    assert parameters.seed is not None  # set when the parameters were made
    return draw(ids, law, uniform(parameters.seed, position, Purpose.SAMPLE))


def _checked(logits: Logits) -> Logits:
    largest = float(np.max(logits))  # NaN wins every comparison
    if not math.isfinite(largest):
        raise RequestError(f"the model's largest logit is {largest}: its weights or the input are broken")
    return logits


def _penalised(logits: Logits, history: Sequence[int], parameters: SamplingParameters) -> Logits:
    window = len(history) if parameters.repeat_last_n < 0 else min(parameters.repeat_last_n, len(history))
    if not parameters.is_penalised or not window:
        return logits
    recent, counts = np.unique(np.asarray(history[len(history) - window :], np.int64), return_counts=True)
    values = logits[recent].astype(np.float64)
    values = np.where(values > 0, values / parameters.repeat_penalty, values * parameters.repeat_penalty)
    values -= counts * parameters.frequency_penalty + parameters.presence_penalty
    penalised = logits.copy()
    penalised[recent] = values
    return penalised


def _likeliest(logits: Logits, count: int) -> Ids:
    """Ids of the `count` largest logits (0: all), the largest first, the lower id first among equals."""
    if count == 1:
        return np.argmax(logits, keepdims=True)
    ids = np.arange(len(logits))
    if 0 < count < len(logits):
        bound = np.partition(logits, len(logits) - count)[len(logits) - count]
        above = np.flatnonzero(logits > bound)
        equal = np.flatnonzero(logits == bound)[: count - len(above)]
        ids = np.sort(np.concatenate((above, equal)))
    return ids[np.argsort(-logits[ids], kind="stable")]


def _top_p_count(logits: Probabilities, top_p: float) -> int:
    """How many of the logits, largest first, have probabilities that sum up to `top_p`: one at least."""
    if top_p >= 1:
        return len(logits)
    return int(np.searchsorted(np.cumsum(_softmax(logits)), top_p, side="left")) + 1


def _softmax(logits: Probabilities) -> Probabilities:
    """Softmax of logits of which the first is the largest."""
    weights = np.exp(logits - logits[0])
    return weights / weights.sum()
