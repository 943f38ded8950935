"""The search for the shortest warm-up, on networks that are told by how large a jump a warm-up leaves."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo

import timeloom as tl
from timeloom.auto import decide as auto_file
from timeloom.auto import warmups
from timeloom.auto.costs import RegisterCost, cheapest, cost_of, longest_warmup
from timeloom.auto.experience import Experience
from timeloom.auto.rounding import ABOVE_ROUNDING, MOST_ROUNDING_SHOWN
from timeloom.auto.sweep_counts import LOOKS
from timeloom.auto.warmups import LOOK_AFTER, NARROW, WarmupSearch
from timeloom.kernels.layer import Cutting
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve.first_sweep import first_sweep
from timeloom.solve.plan import Plan
from timeloom.solvers import Auto

STEPS, NOISE = 16384, 3e-7
GPU = RegisterCost(1.0, 64, 132, True)
Jumps = Callable[[Plan], float]


def cliff(memory: int, noise: float = NOISE, sweeps: int = 99) -> Jumps:
    """All is remembered for so many steps, and nothing is beyond; so many corrected sweeps are enough."""

    def jump(plan: Plan) -> float:
        if plan.sweeps > 1:
            return 5e-6 if plan.sweeps >= sweeps else 0.5
        return noise if plan.warmup >= memory else 1.2

    return jump


def fading(memory: int, noise: float = NOISE) -> Jumps:
    """A difference shrinks step by step, to 1e-6 in so many."""
    return lambda plan: 0.5 if plan.sweeps > 1 else max(noise, 1e-6 ** (plan.warmup / memory))


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as for the kernels of a GPU."""
    monkeypatch.setattr(auto_file, "has_kernels", lambda problem: True)
    monkeypatch.setattr(auto_file, "step_cost", lambda *_: GPU)


class Calls:
    """Forward calls on one layer: what each of them swept."""

    def __init__(self, batch: int = 1) -> None:
        net = zoo.network("gru", dtype=torch.float32)
        x, initial = zoo.data(net, STEPS, batch, dtype=torch.float32)
        self.problem: Recurrence = net.recurrence(x.detach(), initial.detach())
        self.experience, self.swept = Experience(), [[]]  # type: tuple[Experience, list[list[Plan]]]
        self.reports: list[SolveReport] = []

    def run(self, jumps: Jumps, calls: int = 1) -> list[int]:
        """Makes calls; returns the warm-up that each ended with, 0 where it was none."""
        layer: Any = SimpleNamespace(x=self.problem.u, corrects=True)
        for _ in range(calls):
            tried: list[Plan] = []

            def sweep(plan: Plan, tried: list[Plan] = tried) -> tuple[None, float]:
                tried.append(plan)
                return None, 0.0 if plan.chunk >= STEPS else jumps(plan)

            report = first_sweep(sweep, layer, self._plan(), self.experience, self._plan).report
            assert report is not None
            self.experience.learn(report)
            self.reports.append(report)
            self.swept.append(tried)
        return [report.warmup for report in self.reports[-calls:]]

    def _plan(self) -> Plan:
        return Auto().plan(self.problem, self.experience)


@pytest.mark.parametrize("memory", [40, 300, 900, 1700, 3000])
@pytest.mark.parametrize("network", [cliff, fading])
def test_the_shortest_warmup_is_found_in_a_few_calls(network: Callable[[int], Jumps], memory: int) -> None:
    calls = Calls()
    *_, found = calls.run(network(memory), 8)
    assert memory <= found <= 1.3 * NARROW * memory + 8
    assert all(report.solver != "sequential" for report in calls.reports)
    calls.run(network(memory), LOOK_AFTER // 2)
    assert all(len(tried) == 1 for tried in calls.swept[-LOOK_AFTER // 2 :]), "nothing is thrown away any more"


def test_a_search_costs_less_than_it_gains() -> None:
    """Over 20 calls from the first, all that was thrown away included."""
    calls = Calls()
    calls.run(cliff(900), 20)
    swept = sum(plan.sweeps * (plan.chunk + plan.warmup + 64) for tried in calls.swept for plan in tried)
    assert swept < 20 * (128 + 3328)


def test_rounding_is_not_waited_for() -> None:
    """Jumps that no longer warm-up makes smaller: the tolerance gives way, not the plan."""
    calls = Calls()
    calls.run(cliff(900, noise=1.6e-6), 9)
    assert calls.experience.rounding.largest == pytest.approx(1.6e-6)
    assert calls.reports[-1].solver == "shooting[none]"
    assert calls.reports[-1].tolerance == pytest.approx(ABOVE_ROUNDING * 1.6e-6)
    assert 900 <= calls.reports[-1].warmup <= NARROW * 900


def test_jumps_that_are_too_large_for_rounding_are_none() -> None:
    calls = Calls()
    calls.run(cliff(900, noise=3 * MOST_ROUNDING_SHOWN), 3)
    assert calls.experience.rounding.largest == 0.0
    assert all(report.solver == "sequential" for report in calls.reports)


def test_misses_of_different_calls_are_not_compared() -> None:
    """Weights and inputs are others by then: that two jumps are alike says nothing of rounding."""
    experience = Experience()
    experience.note_miss(Cutting(chunk=64, warmup=40), 1.5e-6)
    certified = SolveReport(
        solver="shooting[none]", chunk=64, iterations=1, residuals=(1e-8,), tolerance=1e-6, converged=True,
        fell_back=False, contraction=None, seconds=0.0, reason="", warmup=60,
    )  # fmt: skip
    for _ in range(3):
        experience.learn(certified)
    experience.note_miss(Cutting(chunk=64, warmup=60), 1.6e-6)
    assert experience.rounding.largest == 0.0
    experience.note_miss(Cutting(chunk=64, warmup=80), 1.6e-6)
    assert experience.rounding.largest > 0.0, "within one call it does"


def test_what_shrinks_is_not_rounding() -> None:
    experience = Experience()
    for warmup, jump in ((1000, 3e-6), (1500, 1.2e-6)):
        experience.note_miss(_plan_of(warmup), jump)
    assert experience.rounding.largest == 0.0


def test_a_warmup_is_tried_in_place_of_many_sweeps() -> None:
    """What a short one leaves tells nothing of a network that forgets all at once."""
    calls = Calls()
    found = calls.run(cliff(900, sweeps=9), 6)
    assert calls.reports[0].iterations == 9, "of a warm-up nothing is known yet"
    assert 900 <= found[-1] <= NARROW * 900


def test_sweeps_stay_where_no_warmup_gains() -> None:
    calls = Calls()
    calls.run(cliff(5000, sweeps=6), 40)
    assert all(report.iterations == 6 for report in calls.reports)
    looks = [call for call, tried in enumerate(calls.swept[1:]) if len(tried) > 1]
    assert looks == [0, *LOOKS[:2]], "the first call and a few looks"


def test_inputs_that_take_more_are_granted_more_for_a_while() -> None:
    calls = Calls()
    settled = calls.run(cliff(900), 10)[-1]
    longer = calls.run(cliff(1300), 2)[-1]
    assert longer >= 1300 > settled
    assert calls.run(cliff(900), warmups.LOOK_AFTER_MISS - 2)[-1] == longer
    assert calls.run(cliff(900), 6)[-1] < longer


@pytest.mark.parametrize("network", [cliff, fading])
@pytest.mark.parametrize(("memory", "spread"), [(900, 0.1), (900, 0.3), (2500, 0.15)])
def test_the_search_settles_where_inputs_differ(network: Callable[[int], Jumps], memory: int, spread: float) -> None:
    """What most inputs need is not tried again and again: one that was not enough costs another sweep."""
    calls, drawn = Calls(), random.Random(1)
    for _ in range(400):
        calls.run(network(int(memory * math.exp(spread * drawn.gauss(0, 1)))))
    late = calls.swept[-300:]
    assert sum(len(tried) > 1 for tried in late) <= 0.04 * len(late)
    assert all(tried[-1].chunk < STEPS for tried in late), "never in one chunk"
    warmups = [tried[-1].warmup for tried in late]
    assert statistics.fmean(warmups) < 1.4 * memory * math.exp(2 * spread)


def test_a_network_that_forgets_faster_by_now_is_noticed() -> None:
    calls = Calls()
    calls.run(cliff(3000), 10)
    assert calls.run(cliff(200), LOOK_AFTER // 2)[-1] >= 3000, "nothing is tried all the time"
    assert calls.run(cliff(200), LOOK_AFTER // 2 + 12)[-1] < 400


def test_nothing_is_searched_for_where_nothing_failed() -> None:
    search = WarmupSearch()
    search.note_enough(500)
    assert search.next(1e-6) is None


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("most", [300.0, 2000.0])
def test_the_longest_warmup_that_gains(batch: int, most: float) -> None:
    longest = longest_warmup(STEPS, batch, most, GPU)

    def takes(warmup: int) -> float:
        return cost_of(STEPS, batch, *cheapest(STEPS, batch, warmup, GPU), GPU)

    assert longest == 0 or takes(longest) <= most
    assert takes(longest + 1) > most


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_many_cores_share_a_network_with_a_long_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up that leaves most of them idle less than one chunk does is found, and results stay right."""
    monkeypatch.undo()
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        torch.manual_seed(0)
        ours = getattr(tl, kind)(3, 16)
        exact = getattr(torch.nn, kind)(3, 16).double()
        with torch.no_grad():
            if kind == "RNN":
                ours.weight_hh_l0.copy_(0.985 * torch.linalg.qr(torch.randn(16, 16)).Q)
            else:
                ours.bias_ih_l0[16:32] = 4.5
        exact.load_state_dict(ours.state_dict())
        x = 0.1 * torch.randn(12000, 1, 3)
        for _ in range(5):
            found = _results(ours, x)
        assert 1000 < ours.reports[0].warmup + ours.reports[0].chunk < 6000
        assert 1000 < ours.reports[0].backward.warmup + ours.reports[0].backward.chunk < 6000
        for one, other in zip(found, _results(exact, x.double()), strict=True):
            assert float((one - other).norm() / other.norm()) < 2e-4
    finally:
        torch.set_num_threads(threads)


def _results(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y, _ = module(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(module.parameters()))]


def _plan_of(warmup: int) -> Plan:
    calls = Calls()
    return Auto()._plan_shooting(calls.problem, 128, warmup)
