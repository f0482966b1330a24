"""Rope scaling resolved to frequencies: every kind against its published formula, and every refusal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.models import read_model_config
from dflashc.compiler.models.config import Rope, yarn_frequencies
from dflashc.runtime.errors import BuildError, DflashError, GgufError
from tests.compiler.models.tiny import TinyModel, tiny
from tests.reference.config import read_model

PLAIN = 10000.0 ** (-np.arange(4) / 4)
YARN: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 32,
}


def ropes_of(model: TinyModel, folder: Path) -> tuple[Rope, ...]:
    with open_gguf(model.write(folder / "model.gguf")) as file:
        return read_model_config(file).ropes


def assert_frequencies(rope: Rope, expected: np.ndarray) -> None:
    np.testing.assert_allclose(rope.frequencies, expected, rtol=1e-14)


def test_unscaled(tmp_path: Path) -> None:
    (rope,) = ropes_of(tiny("qwen3"), tmp_path)
    assert_frequencies(rope, PLAIN)
    assert rope.magnitude == 1


def test_some_dimensions_only(tmp_path: Path) -> None:
    (rope,) = ropes_of(tiny("llama").with_metadata(rope__dimension_count=4), tmp_path)
    assert_frequencies(rope, np.array([1, 0.01]))


@pytest.mark.parametrize("kind", ["linear", None])  # files older than the key have a factor alone
def test_linear(kind: str | None, tmp_path: Path) -> None:
    model = tiny("qwen3").with_metadata(rope__scaling__type=kind, rope__scaling__factor=8.0)
    (rope,) = ropes_of(model, tmp_path)
    assert_frequencies(rope, PLAIN / 8)
    assert rope.magnitude == 1


def test_none_ignores_the_factor(tmp_path: Path) -> None:
    model = tiny("qwen3").with_metadata(rope__scaling__type="none", rope__scaling__factor=8.0)
    assert_frequencies(ropes_of(model, tmp_path)[0], PLAIN)


def test_divisors(tmp_path: Path) -> None:
    model = tiny("llama").with_tensors({"rope_freqs.weight": np.array([1, 1, 2.5, 8])})
    assert_frequencies(ropes_of(model, tmp_path)[0], PLAIN / [1, 1, 2.5, 8])


def test_divisors_and_a_factor(tmp_path: Path) -> None:
    model = tiny("llama").with_tensors({"rope_freqs.weight": np.array([1, 1, 2.5, 8])})
    model = model.with_metadata(rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert_frequencies(ropes_of(model, tmp_path)[0], PLAIN / [2, 2, 5, 16])


def test_gemma_scales_its_global_layers_only(tmp_path: Path) -> None:
    model = tiny("gemma3").with_metadata(rope__scaling__type="linear", rope__scaling__factor=8.0, rope__freq_base=1e6)
    by_name = {rope.name: rope for rope in ropes_of(model, tmp_path)}
    assert_frequencies(by_name["global"], 1e6 ** (-np.arange(4) / 4) / 8)
    assert_frequencies(by_name["local"], PLAIN)


def test_gemma_local_base(tmp_path: Path) -> None:
    by_name = {rope.name: rope for rope in ropes_of(tiny("gemma3").with_metadata(rope__freq_base_swa=256.0), tmp_path)}
    assert_frequencies(by_name["local"], 256.0 ** (-np.arange(4) / 4))
    assert_frequencies(by_name["global"], PLAIN)


def test_yarn_of_a_published_model() -> None:
    """Qwen 2.5 at four times 32768: by hand, a pair turns 32 times at index 23.6 and once at 39.6."""
    plain = 1e6 ** (-np.arange(64) / 64)
    scaled = yarn_frequencies(plain, 1e6, 128, 4.0, 32768)
    np.testing.assert_array_equal(scaled[:24], plain[:24])
    np.testing.assert_allclose(scaled[40:], plain[40:] / 4, rtol=1e-15)
    between = np.arange(24, 40)
    share = (between - 23) / 17
    np.testing.assert_allclose(scaled[24:40], plain[24:40] * (share / 4 + 1 - share), rtol=1e-14)


@given(
    pairs=st.integers(2, 128),
    base=st.floats(10.0, 1e7),
    factor=st.floats(1.0, 64.0),
    original=st.integers(256, 1 << 17),
)
def test_yarn_keeps_fast_pairs_and_scales_slow_ones(pairs: int, base: float, factor: float, original: int) -> None:
    """The paper's section 3.2: r turns within the original context; r > 32 keeps a pair, r < 1 divides it by s."""
    plain = base ** (-np.arange(pairs) / pairs)
    scaled = yarn_frequencies(plain, base, 2 * pairs, factor, original)
    turns = original * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 32], plain[turns > 32], rtol=1e-12)
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / factor, rtol=1e-12)
    ratio = plain / scaled
    assert (ratio >= 1 - 1e-12).all()
    assert (ratio <= factor * (1 + 1e-12)).all()
    assert (np.diff(ratio) >= -1e-9).all()


@pytest.mark.parametrize("changes", [
    {},
    {"rope__scaling__attn_factor": 0.5},
    {"rope__scaling__yarn_beta_fast": 4.0, "rope__scaling__yarn_beta_slow": 0.25},
])
def test_yarn_from_a_file(changes: dict[str, Any], tmp_path: Path) -> None:
    (rope,) = ropes_of(tiny("qwen2").with_metadata(**YARN, **changes), tmp_path)
    expected = read_model(tmp_path / "model.gguf")[0].rope[0]
    assert_frequencies(rope, expected.frequencies())
    assert rope.magnitude == pytest.approx(changes.get("rope__scaling__attn_factor", 1) * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "LINEAR"])
def test_unknown_kinds(kind: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=rf"rope\.scaling\.type is '{kind}'; supported: none, linear, yarn"):
        ropes_of(tiny("llama").with_metadata(rope__scaling__type=kind), tmp_path)


@pytest.mark.parametrize(("changes", "message"), [
    ({"rope__scaling__factor": 0.0}, "factor is 0.0; expected a positive number"),
    ({"rope__scaling__factor": math.nan}, "factor is nan; expected a positive number"),
    ({"rope__scaling__attn_factor": -1.0}, "attn_factor is -1.0; expected a positive number"),
    ({"rope__scaling__original_context_length": 0}, "original_context_length is 0; expected 1 to"),
    ({"rope__scaling__yarn_beta_fast": 0.0}, "yarn_beta_fast is 0.0; expected a positive number"),
    ({"rope__scaling__yarn_beta_slow": math.inf}, "yarn_beta_slow is inf; expected a positive number"),
    ({"rope__freq_base": 1.0}, "rope.freq_base is 1.0; yarn scaling needs more than 1"),
])
def test_yarn_values_no_model_has(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=message):
        ropes_of(tiny("llama").with_metadata(**{**YARN, **changes}), tmp_path)


def test_yarn_without_the_original_context(tmp_path: Path) -> None:
    changes = {**YARN, "rope__scaling__original_context_length": None}
    with pytest.raises(GgufError, match=r"original_context_length.* is missing"):
        ropes_of(tiny("llama").with_metadata(**changes), tmp_path)


@pytest.mark.parametrize(("divisors", "message"), [
    (np.ones(3), "has shape (3,); expected 4 entries"),
    (np.ones((2, 4)), "has shape (2, 4); expected 4 entries"),
    (np.array([1, 1, 0, 1]), "has entries that are not positive numbers"),
    (np.array([1, -1, 1, 1]), "has entries that are not positive numbers"),
    (np.array([1, np.nan, 1, 1]), "has entries that are not positive numbers"),
    (np.array([1, np.inf, 1, 1]), "has entries that are not positive numbers"),
])
def test_bad_divisors(divisors: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(DflashError) as error:
        ropes_of(tiny("llama").with_tensors({"rope_freqs.weight": divisors}), tmp_path)
    assert str(error.value) == f"tensor rope_freqs.weight {message}"
