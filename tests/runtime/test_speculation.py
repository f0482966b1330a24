"""What is said of speculation, for runs whose counts are given."""

from __future__ import annotations

from dflashc.runtime.speculation import OnceOnly, summary, time_shares, warnings
from dflashc.runtime.statistics import Statistics
from dflashc.runtime.width import Promise


def run(*rounds: tuple[int, int, int, float]) -> Statistics:
    """Statistics of rounds, given as (how many, width, accepted, seconds)."""
    statistics = Statistics()
    for count, width, accepted, seconds in rounds:
        for _ in range(count):
            statistics.count_round(width, width, accepted)
            statistics.time_round(width, seconds)
    return statistics


def test_summary_counts_tokens_rounds_and_positions() -> None:
    statistics = run((10, 2, 2, 1.0), (10, 2, 1, 1.0), (20, 2, 0, 1.0))
    assert summary(statistics) == "speculation: 70 tokens in 40 rounds, 1.75 per round, accepted 0.50 0.25 per position"


def test_summary_tells_plain_steps_apart() -> None:
    assert summary(run((4, 1, 1, 1.0), (6, 0, 0, 1.0))) == (
        "speculation: 8 tokens in 4 rounds, 2.00 per round, 6 plain steps, accepted 1.00 per position")


def test_summary_is_silent_without_drafts() -> None:
    assert summary(run((5, 0, 0, 1.0))) is None
    assert summary(Statistics()) is None


def test_summary_of_wide_drafts_ends_in_dots() -> None:
    assert summary(run((1, 9, 0, 1.0))) == (
        "speculation: 1 tokens in 1 rounds, 1.00 per round, accepted "
        "0.00 0.00 0.00 0.00 0.00 0.00 0.00 0.00 … per position")


def test_summary_of_drafts_that_were_cut() -> None:
    statistics = run((2, 0, 0, 1.0))
    for proposed, accepted in ((3, 2), (1, 1), (0, 0), (0, 0)):
        statistics.count_round(4, proposed, accepted)
    assert (statistics.drafted, statistics.cut, statistics.offered, statistics.reached) == (4, 12, [2, 1, 1], [2, 1, 0])
    assert summary(statistics) == (
        "speculation: 7 tokens in 4 rounds, 1.75 per round, 2 plain steps, p-min left 1.0 of 4.0 proposals, "
        "accepted 1.00 1.00 0.00 per position")


def test_summary_of_drafts_that_were_all_cut() -> None:
    statistics = Statistics()
    statistics.count_round(4, 0, 0)
    assert summary(statistics) == "speculation: 1 tokens in 1 rounds, 1.00 per round, p-min left 0.0 of 4.0 proposals"


def test_summary_of_a_sampled_answer_tells_the_rule() -> None:
    statistics = run((1, 1, 1, 1.0))
    statistics.rule = "reject"
    assert summary(statistics) == (
        "speculation: 2 tokens in 1 rounds, 2.00 per round, accepted by rejection 1.00 per position")


def test_time_is_shared_out_the_costliest_first() -> None:
    seconds = {"positions": 0.004, "draft": 0.3, "verify": 0.65, "accept": 0.006, "host": 0.04}
    assert time_shares(Statistics(phase_seconds=seconds)) == "time: verify 65 %, draft 30 %, host 4 %, other 1 %"
    assert time_shares(Statistics()) is None


def test_times_are_kept_by_width() -> None:
    statistics = run((2, 0, 0, 0.5), (1, 3, 1, 2.0))
    assert statistics.round_seconds == {0: [0.5, 0.5], 3: [2.0]}
    assert statistics.decode_seconds == 3.0


def test_near_zero_acceptance_is_told_with_causes() -> None:
    (warning,) = warnings(run((30, 4, 0, 1.0), (2, 4, 1, 1.0)))
    assert warning.startswith("hardly any draft is accepted: 2 of 128 proposals in 32 rounds")
    assert "--taps-offset" in warning


def test_short_runs_say_nothing_about_acceptance() -> None:
    assert warnings(run((31, 4, 0, 1.0))) == []


def test_some_acceptance_is_no_warning() -> None:
    assert warnings(run((28, 4, 0, 1.0), (4, 4, 1, 1.0))) == []


def test_slower_than_plain_by_what_the_run_measured() -> None:
    """1.5 tokens in 2 s against one in 1 s; single long rounds do not count."""
    (warning,) = warnings(run((20, 3, 0, 2.0), (20, 3, 1, 2.0), (8, 0, 0, 1.0), (1, 0, 0, 90.0)))
    assert warning.startswith("speculation is slower than plain decoding: 0.8 against 1.0 tokens per second")


def test_slower_than_plain_by_a_record() -> None:
    statistics = run((20, 3, 0, 2.0), (20, 3, 1, 2.0))
    assert warnings(statistics) == []
    assert len(warnings(statistics, plain_seconds=1.0)) == 1
    assert warnings(statistics, plain_seconds=2.0) == []


def test_trials_among_plain_steps_are_not_called_slow() -> None:
    assert warnings(run((200, 0, 0, 1.0), (40, 3, 1, 9.0))) == []


def test_an_unused_drafter_is_told_with_the_reason() -> None:
    promises = [Promise(0, 1.0, 0.1), Promise(1, 1.2, 0.2), Promise(2, 1.3, 0.25)]
    (warning,) = warnings(run((99, 0, 0, 0.1), (1, 1, 1, 0.2)), promises)
    assert warning == ("the drafter is hardly used: plain decoding promises 10.0 tokens per second, drafts of 1 6.0 "
                       "(1.20 tokens in 2.00 times a plain step)")
    assert warnings(run((50, 0, 0, 0.1), (50, 1, 1, 0.2)), promises) == []


def test_each_kind_of_warning_is_said_once() -> None:
    once = OnceOnly()
    first, second = (warnings(run((n, 4, 0, 1.0))) for n in (40, 50))
    assert once.new(first) == first
    assert once.new(second) == []
    assert once.new(["another: 1"]) == ["another: 1"]
