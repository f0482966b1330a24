"""Writes tests/data/exact-gemma3-270m-q4_k_m.json: what the model says along the golden texts when nothing is rounded.

    python -m tests.reference.exact_log_probabilities

The reference in float64, without rounding of activations, keys and values in f16 as in llama.cpp. Takes a minute and
some gigabytes of memory, which is why tests read the file.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.realmodel import SHA256, gemma3_path
from tests.reference.config import read_model
from tests.reference.functions import F16, log_softmax
from tests.reference.transformer import ReferenceModel

DATA = Path(__file__).parents[1] / "data"
NAME = "gemma3-270m-q4_k_m"
WHAT = (
    "Log-probabilities along the texts of golden-gemma3-270m-q4_k_m.json by tests/reference in float64 with exact"
    " activations and f16 K/V, by tests/reference/exact_log_probabilities.py; one row per position: of the token that"
    " follows, and of llama.cpp's five best"
)


def main() -> None:
    golden = json.loads((DATA / f"golden-{NAME}.json").read_text())
    assert golden["model_sha256"] == SHA256
    model = ReferenceModel(*read_model(gemma3_path()), F16)
    texts = []
    for text in golden["forced"]:
        said = log_softmax(model.forward(text["ids"], 0).logits)
        tokens = [[row["next"][0], *(token for token, _ in row["top5"])] for row in text["rows"]]
        texts.append([[round(float(said[i, token]), 5) for token in row] for i, row in enumerate(tokens)])
    lines = ",\n".join(" [" + ",\n  ".join(map(json.dumps, rows)) + "]" for rows in texts)
    (DATA / f"exact-{NAME}.json").write_text(
        f'{{"what": {json.dumps(WHAT)},\n"model_sha256": "{SHA256}",\n"forced": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
