"""The choice of the width, against simulated rounds: costs and acceptance are given, so the best width is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from dflashc.runtime.acceptance import Acceptance, expected_tokens
from dflashc.runtime.costs import CostTable, LearntCosts
from dflashc.runtime.width import AutoWidth, FixedWidth

MOST = 15
COSTS = {
    "bound by launches": [53, 84, 95, 106, 120, 134, 151, 161, 185, 193, 213, 223, 245, 255, 273, 283],
    "bound by bandwidth": [100, 115, 116, 117, 118, 119, 120, 121, 140, 141, 142, 143, 150, 151, 152, 153],
    "dear rows": [100, 190, 220, 260, 300, 340, 380, 420, 460, 500, 540, 580, 620, 660, 700, 740],
    "cliff after 3": [100, 110, 112, 114, 150, 151, 152, 153, 154, 155, 156, 157, 158, 159, 160, 161],
}
KEPT = {
    "nothing": [0.0] * MOST, "little": [0.3] * MOST, "falling": [0.7, 0.65, 0.6, 0.5, 0.4, 0.4, 0.4] + [0.3] * 8,
    "much": [0.85] * MOST, "nearly all": [0.97] * MOST,
}


def uniform(seconds: Sequence[float]) -> CostTable:
    """Costs by width that do not depend on the depth."""
    return CostTable((0,), (tuple(seconds),))


def tokens(kept: Sequence[float], width: int) -> float:
    """Mean tokens per round by the definition: sum over k of the probability that at least k proposals are kept."""
    return 1 + sum(math.prod(kept[:k]) for k in range(1, width + 1))


def speed(costs: Sequence[float], kept: Sequence[float], width: int) -> float:
    return tokens(kept, width) / costs[width]


def best(costs: Sequence[float], kept: Sequence[float]) -> int:
    return max(range(MOST + 1), key=lambda width: speed(costs, kept, width))


class Machine:
    """Runs rounds as costs and acceptance say, with or without noise in what the controller hears."""

    def __init__(self, controller: AutoWidth, costs: Sequence[float], seed: int, noise: float) -> None:
        self.controller, self.costs, self.noise = controller, costs, noise
        self.random = random.Random(seed)
        self.widths: list[int] = []

    def run(self, kept: Sequence[float], rounds: int) -> float:
        """Tokens per time over `rounds`; the time is that of the table."""
        made, time = 0, 0.0
        for _ in range(rounds):
            width = self.controller.choose(100)
            accepted = next((k for k in range(width) if self.random.random() >= kept[k]), width)
            heard = self.costs[width] * math.exp(self.noise * abs(self.random.gauss(0, 1)))
            if self.noise and self.random.random() < 0.03:
                heard *= 10
            self.controller.record(width, accepted, heard)
            self.widths.append(width)
            made, time = made + accepted + 1, time + self.costs[width]
        return made / time


def machine(costs: Sequence[float], seed: int = 0, *, learning: bool = False) -> Machine:
    return Machine(AutoWidth(MOST, None if learning else uniform(costs)), costs, seed, noise=0.2 if learning else 0.0)


@pytest.mark.parametrize("learning", [False, True], ids=["measured costs", "learnt costs"])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_never_far_from_the_best_fixed_width(costs: list[float], kept: list[float], learning: bool) -> None:
    reached = [machine(costs, seed, learning=learning).run(kept, 3000) for seed in range(3)]
    assert sum(reached) / 3 >= 0.95 * speed(costs, kept, best(costs, kept))


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_converges_within_a_hundred_rounds(costs: list[float], kept: list[float]) -> None:
    runner = machine(costs)
    runner.run(kept, 100)
    runner.widths.clear()
    runner.run(kept, 100)
    usual = max(runner.widths, key=runner.widths.count)
    assert speed(costs, kept, usual) >= 0.9 * speed(costs, kept, best(costs, kept))


@pytest.mark.parametrize("learning", [False, True], ids=["measured costs", "learnt costs"])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_follows_the_text(costs: list[float], learning: bool) -> None:
    """Over changing text, no fixed width is better; and each part runs near its own best."""
    parts = [KEPT[name] for name in ("falling", "nothing", "much", "little", "nearly all")]
    runner = machine(costs, seed=1, learning=learning)
    runner.run(parts[0], 100)
    ours = [runner.run(kept, 800) for kept in parts]
    for kept, got in zip(parts, ours, strict=True):
        assert got >= 0.9 * speed(costs, kept, best(costs, kept))
    mean = sum(1 / s for s in ours)  # time for as many tokens of each part
    assert mean <= 1.02 * min(sum(1 / speed(costs, kept, w) for kept in parts) for w in range(MOST + 1))


def test_drafts_nothing_when_nothing_is_kept_and_recovers() -> None:
    costs = COSTS["bound by bandwidth"]
    runner = machine(costs)
    runner.run(KEPT["nothing"], 200)
    runner.widths.clear()
    runner.run(KEPT["nothing"], 1000)
    assert runner.widths.count(0) > 850
    runner.run(KEPT["much"], 300)
    runner.widths.clear()
    runner.run(KEPT["much"], 100)
    assert min(runner.widths) > 0


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_trials_cost_two_percent_at_most(costs: list[float]) -> None:
    runner = machine(costs)
    runner.run(KEPT["nothing"], 200)
    assert runner.run(KEPT["nothing"], 2000) >= speed(costs, KEPT["nothing"], 0) / 1.021


def test_tries_nothing_that_cannot_win() -> None:
    """A draft that costs more than all it could yield is not even tried."""
    runner = machine([1.0, *[6.0 + m for m in range(1, MOST + 1)]])
    runner.run(KEPT["nothing"], 500)
    assert set(runner.widths) == {0}


def test_the_same_rounds_lead_to_the_same_widths() -> None:
    first, second = (machine(COSTS["dear rows"], 5, learning=True) for _ in range(2))
    first.run(KEPT["falling"], 300)
    second.run(KEPT["falling"], 300)
    assert first.widths == second.widths


def test_a_narrower_round_than_chosen_is_no_trial() -> None:
    """Near the end of a budget the session drafts less than asked; the choice stays."""
    runner = machine(COSTS["bound by bandwidth"])
    runner.run(KEPT["nearly all"], 200)
    before = runner.controller.choose(100)
    runner.controller.record(1, 0, 115)
    assert runner.controller.choose(100) == before


def test_costs_follow_the_depth() -> None:
    """Where drafting grows dear with depth, the deep end is decoded plainly."""
    table = CostTable((0, 1000), ((1.0,) * 3, (1.0, 5.0, 9.0)))
    assert table.at(250) == pytest.approx({0: 1.0, 1: 2.0, 2: 3.0})
    assert table.at(5000) == {0: 1.0, 1: 5.0, 2: 9.0}
    controller = AutoWidth(2, table, assumed=[0.9, 0.9])
    assert controller.choose(0) == 2
    for _ in range(50):
        controller.record(controller.choose(1000), 2, 1.0)
    assert controller.choose(1000) == 0


def test_promises_tell_tokens_and_seconds() -> None:
    controller = AutoWidth(2, uniform([1.0, 1.5, 2.0]), assumed=[0.5, 0.25])
    assert [(p.width, p.tokens, p.seconds) for p in controller.promises(0)] == [
        (0, 1.0, 1.0), (1, 1.5, 1.5), (2, 1.625, 2.0)]
    assert AutoWidth(2).promises(0) == []


def test_acceptance_is_the_share_kept_of_those_reached() -> None:
    """After many equal rounds the estimate is their frequency; positions never reached lean on the one before."""
    estimate = Acceptance([0.5] * 4)
    for _ in range(400):
        for accepted in (0, 1, 2, 2):
            estimate.record(3, accepted)
    assert estimate.conditional() == pytest.approx([0.75, 0.66, 0.07, 0.07], abs=0.05)
    assert expected_tokens([0.5, 0.5]) == [1.0, 1.5, 1.75]


def test_learnt_costs_ignore_single_delays() -> None:
    costs = LearntCosts(1)
    while (width := costs.unmeasured()) is not None:
        costs.record(width, [1.0, 2.0][width], usual=False)
    for index in range(30):
        costs.record(0, 100.0 if index % 4 == 0 else 1.0, usual=True)
    assert costs.at(0) == {0: 1.0, 1: 2.0}


def test_learnt_costs_follow_a_slower_machine() -> None:
    costs = LearntCosts(1)
    while (width := costs.unmeasured()) is not None:
        costs.record(width, [1.0, 2.0][width], usual=False)
    for _ in range(9):
        costs.record(0, 3.0, usual=True)
    assert costs.at(0) == {0: 3.0, 1: 6.0}


def test_fixed_width_stays() -> None:
    controller = FixedWidth(3)
    controller.record(3, 0, 1.0)
    assert controller.choose(1000) == 3
