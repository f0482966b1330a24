"""Blocks of an artefact against those of the reference drafter, behind features of the reference target."""

from __future__ import annotations

import numpy as np

from tests.reference.config import read_drafter, read_model
from tests.reference.dflash import ReferenceDrafter
from tests.reference.functions import KV_TYPES, rms_norm
from tests.reference.transformer import ReferenceModel, int8_activations
from tests.rounds.building import Workshop
from tests.rounds.inside import block

LENGTHS = (5, 40, 100)


def check_blocks(workshop: Workshop, name: str, tolerance: float) -> None:
    """Hidden states are off by `tolerance` at most, on average and relative to theirs; so contexts of several lengths
    and blocks of several widths are right, and windows with them."""
    options = workshop.options(name)
    assert options.drafter is not None
    model = ReferenceModel(*read_model(options.model), KV_TYPES[options.kv_type], int8_activations)
    config, weights = read_drafter(options.drafter)
    drafter = ReferenceDrafter(config, weights, model, KV_TYPES[options.drafter_kv_type], int8_activations)
    session = workshop.session(name)
    text = np.random.default_rng(6).integers(0, session.vocabulary, max(LENGTHS)).tolist()
    for length in LENGTHS:
        drafter.inject(drafter.features(model.forward(text[:length], 0)), 0)
        session.rewind(0)
        session.prefill(text[:length], "ids")
        for width in sorted({1, session.most_width // 2, session.most_width}):
            expected = drafter.block_hidden(9, width + 1)
            found = rms_norm(block(session, 9, width).residual, weights["output_norm.weight"].values, config.epsilon)
            assert np.abs(found - expected).mean() <= tolerance * np.abs(expected).mean()
