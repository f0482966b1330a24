"""Synthetic files: they open, their models compute, and the same seed gives the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.pair import inspect_drafter
from dflashc.recipes.drafter import DrafterShape, default_taps, drafter_body, write_drafter
from dflashc.recipes.synthetic import main
from dflashc.recipes.target import PRESETS, llama3_divisors, write_target
from dflashc.recipes.tensors import Formats
from dflashc.recipes.vocabulary import MASK, synthetic_vocabulary
from dflashc.runtime.errors import RequestError
from tests.reference.config import read_drafter, read_model
from tests.reference.dflash import ReferenceDrafter, speculate
from tests.reference.transformer import ReferenceModel, greedy

TINY = [name for name in PRESETS if name.startswith("tiny-")]
FORMATS = [Formats("F32"), Formats("Q8_0"), Formats("Q4_K", {"token_embd": "Q6_K", "ffn_down": "Q5_K"})]


def reference(path: Path) -> ReferenceModel:
    return ReferenceModel(*read_model(path))


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: formats.default)
def test_target_computes(tmp_path: Path, preset: str, formats: Formats) -> None:
    path = tmp_path / "target.gguf"
    write_target(path, PRESETS[preset], formats)
    with open_gguf(path) as file:
        assert file.get_str("general.architecture") == PRESETS[preset].architecture
        assert file.tensors["blk.0.attn_q.weight"].type_name == formats.default
        assert file.tensors["token_embd.weight"].type_name == formats.overrides.get("token_embd", formats.default)
        assert ("output.weight" in file.tensors) is not PRESETS[preset].tied
        assert file.tensors["blk.0.attn_norm.weight"].type_name == "F32"
    logits = reference(path).forward(list(range(40)), 0).logits
    assert logits.shape == (40, PRESETS[preset].vocabulary)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1


@pytest.mark.parametrize("version", [1, 2])
def test_drafter_computes(tmp_path: Path, version: int) -> None:
    target, path = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    write_target(target, PRESETS["tiny-llama"], Formats("F32"))
    shape = DrafterShape(drafter_body(target), default_taps(target), version=version, sliding_window=8)
    write_drafter(path, target, shape, Formats("Q8_0"))
    config, weights = read_drafter(path)
    assert config.taps == (0, 1, 2)
    assert config.sliding == (True, False)
    assert config.mask_token == synthetic_vocabulary(512).id_of(MASK)
    model = reference(target)
    run = speculate(model, ReferenceDrafter(config, weights, model), [1, 2, 3], 12, width=15)
    assert run.tokens == greedy(model, [1, 2, 3], 12)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-gemma3"])
def test_copying_drafter_is_accepted(tmp_path: Path, preset: str, version: int) -> None:
    target, path = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    write_target(target, replace(PRESETS[preset], weight_scale=0.05), Formats("Q8_0"))
    shape = DrafterShape(drafter_body(target), default_taps(target), version=version, selector_rank=256)
    write_drafter(path, target, shape, Formats("Q4_K"), copying=True)
    model = reference(target)
    run = speculate(model, ReferenceDrafter(*read_drafter(path), model), [7], 65, width=7)
    assert run.tokens == [7] * 65
    assert run.accepted == [7] * 8


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for path, seed in ((first, 1), (second, 1), (other, 2)):
        write_target(path, PRESETS["tiny-qwen3"], FORMATS[2], seed)
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    assert sorted(tmp_path.iterdir()) == [first, other, second]


def test_vocabulary_spells_any_text() -> None:
    vocabulary = synthetic_vocabulary(400)
    assert len(set(vocabulary.tokens)) == len(vocabulary.tokens) == len(vocabulary.types) == 400
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "the being 日本語 😀\n\tnaïve \x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode(" the").ids == [ids["Ġthe"]]


def test_llama3_divisors() -> None:
    base, size, factor = 5e5, 128, 8.0
    divisors = llama3_divisors(base, size, factor)
    wavelengths = np.array([2 * np.pi * base ** (2 * pair / size) for pair in range(size // 2)])
    assert np.all(divisors[wavelengths < 8192 / 4] == 1)
    assert np.all(divisors[wavelengths > 8192] == factor)
    between = divisors[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert np.all(np.diff([1, *between, factor]) > 0)


def test_command_line(tmp_path: Path) -> None:
    target, drafter = str(tmp_path / "t.gguf"), str(tmp_path / "d.gguf")
    run = CliRunner().invoke(
        main, ["target", "-o", target, "--layers", "6", "--format", "Q4_0", "--override", "attn_v=Q8_0"]
    )
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(main, ["drafter", "-o", drafter, "--target", target, "--version", "2", "--taps", "0,3"])
    assert run.exit_code == 0, run.output
    with open_gguf(target) as file:
        assert file.get_int("qwen3.block_count") == 6
        assert file.tensors["blk.5.attn_v.weight"].type_name == "Q8_0"
    with open_gguf(drafter) as file:
        assert file.get_ints("dflash.target_layers") == [1, 4]
    extras = ["--bias", "--sinks", "--draft-vocabulary", "50", "--context-rope-base", "5000"]
    run = CliRunner().invoke(main, ["drafter", "-o", drafter, "--target", target, *extras])
    assert run.exit_code == 0, run.output
    config = inspect_drafter(Path(drafter)).config
    assert (config.attention_bias, config.sinks, config.draft_vocabulary) == (True, True, 50)
    assert config.context_rope != config.rope


def test_refusals(tmp_path: Path) -> None:
    path, target = tmp_path / "model.gguf", tmp_path / "target.gguf"
    tiny = PRESETS["tiny-qwen3"]
    with pytest.raises(RequestError, match=r"attn_output.weight: rows of 128 .* override the format of attn_output"):
        write_target(path, replace(tiny, heads=2), Formats("Q4_K"))
    with pytest.raises(RequestError, match="no tensor 'ffn_dwon'"):
        write_target(path, tiny, Formats("Q8_0", {"ffn_dwon": "F16"}))
    with pytest.raises(RequestError, match="gemma3 alone has one"):
        replace(tiny, sliding_window=16)
    write_target(target, tiny, Formats("F32"))
    body = drafter_body(target)
    with pytest.raises(RequestError, match=r"taps \[3\] must be target layers 0 to 2"):
        write_drafter(path, target, DrafterShape(body, (3,)), Formats("F32"))
    with pytest.raises(RequestError, match="a head of 513 tokens does not fit a vocabulary of 512"):
        DrafterShape(body, (0,), draft_vocabulary=513)
    with pytest.raises(RequestError, match="66 rotated dimensions do not fit heads of 64"):
        replace(tiny, rotated=66)
    with pytest.raises(RequestError, match="hidden size 128, the target 512 and 256"):
        write_drafter(path, target, DrafterShape(replace(body, hidden=128), (0,)), Formats("F32"))
    assert not path.exists()
