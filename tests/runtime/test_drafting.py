"""Which rule a request's proposals are accepted by, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dflashc.runtime.drafting import DraftParameters
from dflashc.runtime.errors import RequestError
from dflashc.runtime.sampling import SamplingParameters


@pytest.mark.parametrize(("accept", "candidates", "temperature"), [
    ("auto", 16, 0.7), ("reject", 16, 0.7), ("match", 16, 0.0), ("auto", 0, 0.0), ("reject", 0, 0.0)])
def test_proposals_are_drawn_as_the_request_is(accept: str, candidates: int, temperature: float) -> None:
    assert DraftParameters(accept).temperature(SamplingParameters(temperature=0.7), candidates) == temperature


@pytest.mark.parametrize(("changes", "message"), [
    ({"accept": "both"}, "accept is 'both', expected one of auto, match, reject"),
    ({"p_min": -0.1}, "p_min is -0.1, expected a number from 0.0 to 1.0"), ({"p_min": 1.01}, "p_min is 1.01"),
    ({"p_min": float("nan")}, "p_min is nan"), ({"p_min": True}, "p_min is True"), ({"p_min": "1"}, "p_min is '1'")])
def test_values_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DraftParameters(**changes)
