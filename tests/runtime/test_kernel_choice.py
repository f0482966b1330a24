"""Kernels are chosen by their times: on a device whose times are written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflashc.runtime import kernel_choice
from dflashc.runtime.errors import ArtefactError, TargetError
from dflashc.runtime.kernel_choice import Trial, choices_of, time_kernels
from dflashc.runtime.plan import Launch, Operand, Plan, Program, Units

VARIANTS = (("8 slices", "m8"), ("4 slices", "m4"), ("16 slices", "m16"))


def launch(choice: str, kernel: str = "m8", variants: tuple[tuple[str, str], ...] = VARIANTS) -> Launch:
    return Launch(kernel, choice, Units(4), 1, (Operand("i64", "", 7),), choice=choice, variants=variants)


def plan(*choices: str) -> Plan:
    """Programs of 1, 4, 8 and 16 rows with a launch of each choice, and one without."""
    launches = (Launch("norm", "norm", Units(1), 1, ()), *(launch(c) for c in choices))
    return Plan({}, {f"decode.{rows}": Program("decode", rows, launches) for rows in (1, 4, 8, 16)}, 256)


class TimedDevice:
    """Runs launches in the times of their kernels; "dead" ones are refused."""

    def __init__(self, seconds: Mapping[str, float | str]) -> None:
        self.seconds = seconds
        self.recorded: list[list[str]] = []

    def record(self, launches: Sequence[Launch], memories: Mapping[str, Any], context: int) -> Any:
        kernels = [x.kernel for x in launches]
        self.recorded.append(kernels)
        if any(self.seconds[k] == "dead" for k in kernels):
            raise TargetError("a kernel that this device does not take")
        times = np.array([self.seconds[k] for k in kernels], float)
        return type("Replay", (), {"run": lambda self: None, "seconds": lambda self: times})()


class Artefact:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "session_memories", lambda *a: {"residual": None})


def trials(device: TimedDevice, *choices: str) -> list[Trial]:
    artefact: Any = Artefact(plan(*choices))
    return time_kernels(artefact, device, lambda *a: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "best"), [
    ({"m8": 1.0, "m4": 0.5, "m16": 2.0}, "4 slices"),
    ({"m8": 1.0, "m4": 1.5, "m16": 0.7}, "16 slices"),
    ({"m8": 1.0, "m4": 0.99, "m16": 2.0}, "8 slices"),  # within what times differ by anyway
    ({"m8": 1.0, "m4": 0.9, "m16": "dead"}, "4 slices"),
    ({"m8": 1.0, "m4": "dead", "m16": "dead"}, "8 slices"),
])
def test_the_fastest_by_a_margin(seconds: dict[str, float | str], best: str) -> None:
    device = TimedDevice(seconds)
    (trial,) = trials(device, "q8_0 32 x 64")
    assert trial.best == best
    assert trial.seconds["8 slices"] == 3.0, "launches of 1, 8 and 16 rows"
    assert device.recorded[0] == ["m8"] * 3


def test_a_default_that_fails_is_an_error() -> None:
    with pytest.raises(TargetError):
        trials(TimedDevice({"m8": "dead", "m4": 1.0, "m16": 1.0}), "a")


def test_a_slow_first_run_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "TRIAL_SECONDS", -1.0)
    (trial,) = trials(TimedDevice({"m8": 1.0, "m4": 0.1, "m16": 0.1}), "a")
    assert (trial.best, set(trial.seconds.values())) == ("8 slices", {float("inf")})


def test_choosing_changes_all_launches_of_a_choice_and_no_other() -> None:
    before = plan("a", "b")
    after = before.choose({"a": "16 slices"})
    for program in after.programs.values():
        assert [x.kernel for x in program.launches] == ["norm", "m16", "m8"]
    assert before.choose({}) == before
    assert after.choose({"a": "8 slices"}) == before
    assert set(choices_of(before)) == {"a", "b"}
    assert Plan.from_json(after.to_json()) == after


@pytest.mark.parametrize("chosen", [{"a": "3 slices"}, {"a": ""}])
def test_unknown_variants_are_refused(chosen: dict[str, str]) -> None:
    with pytest.raises(ArtefactError, match="was chosen, which the plan does not have"):
        plan("a").choose(chosen)


def test_a_launch_without_variants_has_none() -> None:
    with pytest.raises(ArtefactError):
        replace(launch("a"), variants=()).variant("8 slices")
