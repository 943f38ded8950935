"""Ways to run a pass, by device times that are told: the fastest is found, whatever the costs say."""

from __future__ import annotations

from typing import Any

import pytest
from test_warmups import Calls, cliff, on_gpu  # noqa: F401

from timeloom.auto.trials import FINENESS, TIMED, Trials, fastest
from timeloom.kernels.layer import Cutting
from timeloom.solve import first_sweep
from timeloom.solve.plan import Plan


class Clock:
    """A stand-in for a GPU's watch: milliseconds by the way a plan runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, warmup: float, sweeps: float) -> None:
        self.of_way, self.looked = {1: warmup}, 0
        self._others = sweeps
        monkeypatch.setattr(first_sweep, "watch_for", self.watch)

    def watch(self, plan: Plan, experience: Any, device: Any) -> Any:
        if not experience.trials.want(plan, plan.expected):
            return None
        self.looked += 1
        clock = self

        class Watch:
            def stop(self) -> None:
                pass

            def milliseconds(self) -> float:
                return 1e-3 * plan.expected * clock.of_way.get(plan.sweeps, clock._others)

        return Watch()


@pytest.mark.parametrize(("sweeps", "chosen"), [(1.0, 1), (3.0, 1), (0.3, 9)])
def test_the_faster_of_two_ways_stays(monkeypatch: pytest.MonkeyPatch, sweeps: float, chosen: int) -> None:
    """Nine sweeps and a warm-up of 1,000 steps should take about the same."""
    Clock(monkeypatch, 1.0, sweeps)
    calls = Calls()
    calls.run(cliff(1000, sweeps=9), 50)
    ways = {report.iterations for report in calls.reports}
    assert {1, 9} <= ways, "both were tried"
    assert {report.iterations for report in calls.reports[-20:]} == {chosen}


def test_what_is_far_from_the_fastest_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 1.0, 0.01)
    calls = Calls()
    calls.run(cliff(300, sweeps=11), 40)
    assert all(report.iterations == 1 for report in calls.reports[10:])


def test_a_plan_that_stays_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0, 1.0)
    calls = Calls()
    calls.run(cliff(300), 30)
    timed = clock.looked
    calls.run(cliff(300), 10)
    assert clock.looked == timed


def test_the_least_of_several_times_counts() -> None:
    trials, six, seven = Trials(), Cutting(128, 0, 6), Cutting(128, 0, 7)
    for factor in (9.0, 4.0, 1.0, 1.2, 1.1, 2.0):
        assert trials.factors == (None, None, None)
        assert trials.want(six, 1000.0)
        trials.note(six, 1000.0, factor)
    assert trials.factors == (None, 0, None)
    assert not trials.want(six, 1000.0)
    assert trials.want(seven, 1000.0), "another plan"
    assert not trials.want(seven, 0.0), "the costs say nothing"
    for _ in range(TIMED):
        trials.note(seven, 1000.0, 2.0)
    assert trials.factors == (None, FINENESS, None)


def test_nothing_is_tried_before_the_best_was_measured() -> None:
    takes = {"warm-up": 100.0, "sweeps": 110.0, "dense": 200.0}
    assert fastest(takes, (None, None, None)) == "warm-up"
    assert fastest(takes, (8, None, None)) == "sweeps", "it may be faster"
    assert fastest(takes, (8, 8, None)) == "warm-up"
    assert fastest(takes, (8, 0, None)) == "sweeps"
    assert fastest(takes, (8, 8, -8)) == "dense"
    assert fastest({"sweeps": 110.0}, (8, None, None)) == "sweeps"
