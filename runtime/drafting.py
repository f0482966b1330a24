"""How a request uses the drafter: by which rule proposals are accepted, and which are not worth verifying.

Knows nothing of devices or widths.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflashc.runtime.errors import RequestError
from dflashc.runtime.sampling import SamplingParameters

ACCEPT = ("auto", "match", "reject")


@dataclass(frozen=True)
class DraftParameters:
    """How proposals are drawn, cut and accepted. Greedy requests know one rule only, whatever is asked.

    Attributes
    ----------
    accept : "match" proposes the likeliest token, and keeps it if the request's sampler draws the same; the text is
        that of plain decoding with the same seed. "reject" draws proposals at the request's temperature, and keeps one
        with probability min(1, p / q), p being the sampler's and q the drafter's; the law is that of plain decoding,
        the text of a seed is another. "auto" rejects where it can: where the drafter gives probabilities (version 2)
        and tokens are drawn on the device.
    p_min : a draft ends before the first position where the drafter's likeliest token is less probable than this; 0 to
        1. The likeliest, and not the proposed one: a cut by what was drawn would change the law of the text. So would
        a least length, which drops a token for those behind it.

    Raises
    ------
    RequestError
        Another rule, or a probability out of its range.
    """

    accept: str = "auto"
    p_min: float = 0.0

    def __post_init__(self) -> None:
        if self.accept not in ACCEPT:
            raise RequestError(f"accept is {self.accept!r}, expected one of {', '.join(ACCEPT)}")
        is_number = isinstance(self.p_min, int | float) and not isinstance(self.p_min, bool)
        if not is_number or not 0 <= self.p_min <= 1:
            raise RequestError(f"p_min is {self.p_min!r}, expected a number from 0.0 to 1.0")

    def temperature(self, parameters: SamplingParameters, candidates: int) -> float:
        """What proposals are drawn at for tokens that the device draws; 0 where they are accepted by matching.

        Parameters
        ----------
        candidates : tokens that the drafter gives probabilities; 0 where it gives none.
        """
        return parameters.temperature if candidates and self.accept != "match" else 0.0
