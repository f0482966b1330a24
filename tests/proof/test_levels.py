"""Every feature level that this CPU can run: logits of the reference, and bits that do not depend on cuts.

The other proofs show the best level, in more detail.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflashc.targets.cpu.traits import LEVELS, host_features
from tests.proof.comparing import errors
from tests.proof.running import build_artefact, logits_along, same_bits, session_of
from tests.reference.config import read_model
from tests.reference.functions import F16
from tests.reference.transformer import ReferenceModel, int8_activations

TEXT = np.random.default_rng(2).integers(0, 2048, 300).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("quantisation", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("level", LEVELS)
def test_level(level: str, quantisation: str, pycode_model: Path, tmp_path: Path) -> None:
    missing = set(LEVELS[level].features) - host_features()
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    model = pycode_model.with_name(f"pycode-3m-{quantisation}.gguf")
    with session_of(build_artefact(model, tmp_path, target=f"cpu-{level}")) as session:
        alone = logits_along(session, TEXT, rows=1)
        for rows in (2, 3, 5, 7, 8, 13, 16):
            assert same_bits(logits_along(session, TEXT, rows), alone)
        session.rewind(0)
        session.prefill(TEXT, "logits")
        assert same_bits(session.logits(1)[0], alone[-1])
        reference = ReferenceModel(*read_model(model), F16, int8_activations)
        whole, pieces = errors(session, reference, TEXT[:120])
    assert np.quantile(pieces, 0.1) <= 1e-6
    assert whole <= 0.05
