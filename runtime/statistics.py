"""What a generation did: tokens, rounds, proposals, and where the time went. Knows nothing of how it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counts and times, in seconds; `cached` are prompt tokens that were already in the caches.

    Attributes
    ----------
    rounds, drafts : int
        Passes of the target after prefill, and those of them that a draft came before.
    drafted, accepted : int
        Proposals that were verified, and those that were kept (llama.cpp's draft_n and draft_n_accepted).
    cut : int
        Proposals that were drafted and not verified, being less probable than p-min or behind one that was.
    rule : str
        How proposals of a sampled answer were accepted, "match" or "reject"; empty for a greedy one.
    reached : list of int
        Per position 1.. of a proposal: rounds in which it was kept, out of `offered` rounds in which it was verified.
    round_seconds : dict
        By the width that was drafted, the time of every round; their sum is `decode_seconds`.
    device_seconds, record_seconds : float
        Parts of `decode_seconds`: in which the device ran, and in which its launches were recorded.
    phase_seconds : dict
        `decode_seconds` by phase, see `phases`; empty on devices that do not count.
    """

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    cut: int = 0
    rule: str = ""
    reached: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    round_seconds: dict[int, list[float]] = field(default_factory=dict)
    device_seconds: float = 0.0
    record_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def count_round(self, width: int, proposed: int, accepted: int) -> None:
        """A round that drafted `width` proposals, verified the first `proposed` and kept the first `accepted`."""
        self.rounds += 1
        self.drafts += width > 0
        self.drafted += proposed
        self.cut += width - proposed
        self.accepted += accepted
        grow = proposed - len(self.offered)
        self.offered += [0] * grow
        self.reached += [0] * grow
        for position in range(proposed):
            self.offered[position] += 1
            self.reached[position] += position < accepted

    def time_round(self, width: int, seconds: float) -> None:
        self.decode_seconds += seconds
        self.round_seconds.setdefault(width, []).append(seconds)
