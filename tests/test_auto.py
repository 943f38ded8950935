"""`auto`: what it decides, what it learns, and that it neither insists on a lost cause nor forgets to look again."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import timeloom as tl
from timeloom.auto import cudnn, thresholds
from timeloom.auto import decide as auto_file
from timeloom.auto.costs import (
    LEAST_CORRECTED,
    WORTH_CUTTING,
    RegisterCost,
    StepCost,
    cheapest,
    cost_of,
    cost_of_sweeps,
)
from timeloom.auto.decide import PATIENCE
from timeloom.auto.experience import FIRST_PAUSE, LONGEST_PAUSE, Experience
from timeloom.auto.layer_experience import LayerExperience
from timeloom.auto.sweep_counts import FIRST_LOOK, KNOWN_FOR, LOOK_AFTER, SPARE_SOLVES, TOO_MANY, SweepCounts
from timeloom.cells import GenericCell
from timeloom.kernels.cpu import build
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solvers import Auto, Shooting, Solver

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 1024

FIRST_WARMUP = Experience().warmup(1e-6)


@pytest.fixture(autouse=True)
def compiled_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions as with the C kernels, whether or not they can be built here."""
    monkeypatch.setattr(auto_file, "step_cost", lambda *_: StepCost(2.0))


def problem_of(steps: int = STEPS, batch: int = 1) -> Recurrence:
    net = zoo.network("gru", dtype=torch.float32)
    x, initial = zoo.data(net, steps, batch, dtype=torch.float32)
    return net.recurrence(x.detach(), initial.detach())


def report_of(
    warmup: int, residual: float, fell_back: bool = False, tolerance: float = 1e-6, sweeps: int = 1
) -> SolveReport:
    return SolveReport(
        solver="shooting[none]",
        chunk=64,
        iterations=sweeps,
        residuals=(residual, *[0.0] * (sweeps - 1)),
        tolerance=tolerance,
        converged=True,
        fell_back=fell_back,
        contraction=None,
        seconds=0.0,
        warmup=warmup,
    )


@pytest.mark.parametrize(("second", "longer"), [(3e-8, True), (2e-6, False)])
def test_a_jump_near_the_tolerance_asks_for_a_longer_warmup_where_it_is_not_rounding(
    second: float, longer: bool
) -> None:
    experience = Experience(forgetting=0.89)
    before = experience.warmup(1e-6)
    experience.learn(replace(report_of(before, 2.4e-6, sweeps=2), residuals=(2.4e-6, second)))
    assert (experience.warmup(1e-6) > before) == longer


# ---- decisions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overhead", "threads"), [(0.5, 1), (2.0, 3), (100.0, 2)])
@pytest.mark.parametrize("warmup", [4, 48, 500])
@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize("steps", [1, 7, 100, 1000, 16384])
def test_cheapest_is_the_cheapest(steps: int, batch: int, warmup: int, overhead: float, threads: int) -> None:
    """By the cost it documents, over the numbers of chunks it considers."""

    def cost(chunk: int, lead: int) -> float:
        rows = math.ceil(math.ceil(steps / chunk) * batch / threads)
        return (chunk + lead) * (overhead + rows)

    chunk, lead = cheapest(steps, batch, warmup, StepCost(overhead, threads))
    assert 1 <= chunk <= steps
    assert (chunk, lead) == (steps, 0) or lead == warmup
    assert cost(chunk, lead) <= cost(steps, 0)
    chunks = 2
    while chunks <= steps // 4:
        assert cost(chunk, lead) <= cost(math.ceil(steps / chunks), warmup) + 1e-9
        chunks *= 2


@pytest.mark.parametrize(
    ("batch", "memory", "cut"), [(16, 48, True), (16, 200, False), (1, 200, True), (1, 7500, False)]
)
def test_a_long_warmup_must_be_worth_it(batch: int, memory: int, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may turn out too short, so that a batch that fills the cores is not cut for a hundredth of its time."""
    shared = StepCost(0.5, 2)
    monkeypatch.setattr(auto_file, "step_cost", lambda *_: shared)
    experience = Experience()
    experience.note_look(memory, 1e-6 / 4)
    plan = Auto().plan(problem_of(16384, batch), experience)
    assert (plan.chunk < 16384) == cut
    if cut and memory > FIRST_WARMUP:
        one = cost_of(16384, batch, 16384, 0, shared)
        assert cost_of(16384, batch, plan.chunk, plan.warmup, shared) <= WORTH_CUTTING * one


def test_long_thin_problems_are_cut_and_short_or_wide_ones_are_not() -> None:
    assert cheapest(16384, 1, 48, StepCost(2.0))[0] < 16384
    assert cheapest(16, 1, 48, StepCost(2.0)) == (16, 0)
    assert cheapest(16384, 10_000, 48, StepCost(2.0)) == (16384, 0)
    assert cheapest(16384, 1, 20_000, StepCost(2.0)) == (16384, 0)
    assert cheapest(16384, 64, 48, StepCost(1000.0))[0] < 16384, "where a step costs much by itself, fewer steps pay"


GPU = RegisterCost(gates=1.0, units=64, side_by_side=132, tiled=True)
"""What a GRU of 64 units costs on an H200."""


def test_a_gpu_is_filled_and_not_much_more() -> None:
    assert GPU.of(1) == GPU.of(132) < GPU.of(133)
    for batch in (1, 16, 256):
        chunk, _ = cheapest(16384, batch, 32, GPU)
        assert 100 <= 16384 / chunk * batch <= 16000


def test_rows_that_several_multiprocessors_share_fill_the_gpu() -> None:
    """29 clusters of four: 16 chunks would leave half of them idle, 32 would wait for each other."""
    shared = RegisterCost(gates=1.0, units=256, side_by_side=29, tiled=False, blocks=4)
    assert cheapest(16384, 1, 500, shared)[0] == math.ceil(16384 / 29)


def test_wide_layers_take_many_rows_a_launch_each_step() -> None:
    wide = RegisterCost(gates=1.0, units=1024, side_by_side=0, tiled=False, blocks=0)
    assert wide.of(512) < 10 * wide.of(1)
    assert 64 <= 16384 / cheapest(16384, 1, 32, wide)[0] <= 1024


def test_a_first_look_assumes_and_says_so() -> None:
    plan = Auto().plan(problem_of(), Experience())
    assert plan.chunk < STEPS
    assert plan.warmup == FIRST_WARMUP
    assert plan.max_iters == PATIENCE
    assert plan.correction == "auto"
    assert plan.reason == f"auto: {-(-STEPS // plan.chunk)} chunks, warm-up of {FIRST_WARMUP} steps assumed"
    plan = Auto().plan(problem_of(8), Experience())
    assert (plan.chunk, plan.warmup) == (8, 0)
    assert plan.reason == "auto: one chunk is cheapest for T=8, B=1"


def test_dense_transfers_are_left_out_where_they_cannot_pay() -> None:
    """Beside compiled sweeps a whole sequential run costs less than one dense transfer."""
    wide = Recurrence(problem_of().cell, problem_of().u.double(), problem_of().initial.double())
    assert Auto().plan(wide, Experience()).newton_up_to > 0
    if build.unavailable() is None:
        assert Auto().plan(problem_of(), Experience()).newton_up_to == 0


@pytest.mark.parametrize("solver", [Auto(), Shooting(chunk=16)], ids=["auto", "shooting"])
@pytest.mark.parametrize(("name", "cheap"), [("function", False), ("function of tuple", False), ("elementwise", True)])
def test_the_diagonal_of_a_users_dense_jacobian_is_not_asked_for(
    name: str, cheap: bool, solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would cost as many backward passes a step as the state has units; a probe tells whether it is dense."""
    asked, original = [], GenericCell.decay

    def watched(self: GenericCell, state: Tensor, u: Tensor) -> Tensor:
        asked.append(len(state))
        return original(self, state, u)

    monkeypatch.setattr(GenericCell, "decay", watched)
    monkeypatch.setattr(auto_file, "step_cost", lambda *_: StepCost(100.0))
    net = zoo.network(name)
    x, initial = zoo.data(net, 256, 1)
    solution = zoo.solve(net, x, initial, solver)
    solution.outputs.sum().backward()
    assert solution.report.chunk < 256
    assert bool(asked) is cheap


def test_options_of_auto_are_kept() -> None:
    plan = Auto(tol=1e-3, max_iters=2, on_divergence="ignore").plan(problem_of(), Experience())
    assert (plan.tolerance, plan.max_iters, plan.on_divergence) == (1e-3, 2, "ignore")


# ---- learning ---------------------------------------------------------------------------------------------------


def test_the_warmup_is_what_the_network_needs() -> None:
    """A network that shrinks differences by 0.8 a step needs log(tol / 4) / log(0.8) steps, here 69; by eighths of a
    power of two, so that plans stay the same: 72.
    """
    experience = Experience()
    experience.learn(report_of(48, 0.8**48))
    assert experience.forgetting == pytest.approx(0.8)
    assert math.ceil(math.log(2.5e-7) / math.log(0.8)) == 69
    assert experience.warmup(1e-6) == 72
    assert experience.warmup(1e-3) < experience.warmup(1e-6)
    plan = Auto().plan(problem_of(), experience)
    assert plan.warmup == experience.warmup(1e-6)
    assert "learned" in plan.reason


def test_a_network_that_forgets_slowly_gets_a_longer_warmup() -> None:
    experience = Experience()
    experience.learn(report_of(48, 0.9**48))
    assert experience.warmup(1e-6) > FIRST_WARMUP
    plan = Auto().plan(problem_of(8192), experience)
    assert plan.warmup == experience.warmup(1e-6)


def test_a_warmup_stays_where_nearly_all_of_it_is_needed() -> None:
    """Plans that change from call to call could not be recorded and replayed."""
    experience = Experience()
    experience.learn(report_of(48, 0.8**48))
    planned = experience.warmup(1e-6)
    for jump in (0.8**48, 0.795**48, 0.802**48):
        experience.learn(report_of(48, jump))
        assert experience.warmup(1e-6) == planned
    experience.learn(report_of(48, 0.75**48))
    assert experience.warmup(1e-6) < 0.9 * planned


def test_a_warmup_that_was_far_too_long_shrinks() -> None:
    """Also where the tolerance is near rounding, as that of gradients is."""
    experience = Experience()
    experience.learn(report_of(10_000, 0.0, tolerance=2.5e-7))
    for _ in range(12):
        planned = experience.warmup(2.5e-7)
        experience.learn(report_of(planned, 0.0, tolerance=2.5e-7))
    assert experience.warmup(2.5e-7) < 2_500


def test_the_number_of_sweeps_settles() -> None:
    """A network that needs six is not tried with five again and again, each time in vain."""
    experience, misses = Experience(forgetting=0.999), 0
    plan = replace(Auto().plan(problem_of(), Experience()), warmup=0, sweeps=4, accepts=1e-5)
    for _ in range(40):
        plan = replace(plan, sweeps=experience.counts.needed or plan.sweeps)
        experience.note_plan(plan.sweeps)
        while plan.sweeps < 6:
            experience.note_miss(plan, 1e-3)
            misses += 1
            assert experience.counts.needed is not None
            plan = replace(plan, sweeps=experience.counts.needed)
            experience.note_plan(plan.sweeps)
        report = replace(report_of(0, 1e-9, tolerance=1e-5), iterations=plan.sweeps, solver="shooting[diag]")
        experience.learn(report)
    assert misses <= 2
    assert experience.counts.needed == 6


def test_rounding_does_not_lengthen_the_warmup() -> None:
    """A first jump near the tolerance is noise: were it taken for slow forgetting, warm-ups would only grow."""
    experience = Experience()
    experience.learn(report_of(20, 1e-7))
    before = experience.warmup(1e-6)
    experience.learn(report_of(before, 2e-6))
    assert experience.warmup(1e-6) <= before
    experience.learn(report_of(before, 1e-3))
    assert experience.warmup(1e-6) > before


def test_a_run_of_one_chunk_teaches_nothing() -> None:
    experience = Experience()
    experience.learn(report_of(48, 1e-5))
    before = copy.copy(experience)
    experience.learn(report_of(0, 0.0))
    assert experience == before


def test_real_runs_learn_a_shorter_warmup_and_stay_right() -> None:
    """A network that forgets at once: the warm-up shrinks call by call, and the results do not suffer."""
    net = zoo.network("rnn tanh", dtype=torch.float32)
    with torch.no_grad():
        net.parameters["weight_hh_l0"].mul_(0.1)
    x, initial = zoo.data(net, STEPS, 1, dtype=torch.float32)
    expected, _ = zoo.truth(net, x, initial)
    experience, warmups = LayerExperience(), []
    for _ in range(12):
        solution = zoo.solve(net, x, initial, Auto(), experience=experience)
        assert not solution.report.fell_back
        assert zoo.difference(solution.outputs, expected) < 1e-5
        warmups.append(solution.report.warmup)
    assert warmups[0] == FIRST_WARMUP
    assert warmups == sorted(warmups, reverse=True)
    assert warmups[-1] <= 0.75 * FIRST_WARMUP


def test_real_runs_learn_a_longer_warmup() -> None:
    net = zoo.network("gru", n=8, dtype=torch.float32)
    with torch.no_grad():
        net.parameters["bias_ih_l0"][8:16] += 2
    x, initial = zoo.data(net, 8192, 1, dtype=torch.float32)
    experience = LayerExperience()
    sweeps = []
    for _ in range(4):
        solution = zoo.solve(net, x, initial, Auto(), experience=experience)
        sweeps.append((solution.report.warmup, solution.report.iterations))
    assert sweeps[0][0] == FIRST_WARMUP < sweeps[-1][0]
    assert sweeps[-1][1] < sweeps[0][1]


# ---- a network that does not contract ---------------------------------------------------------------------------


def tries(experience: Experience, calls: int, residual: float, sweeps: int = 1) -> list[int]:
    """Numbers of the calls, out of so many, on which shooting is tried; each try meets this first residual.

    With one sweep a large residual makes it give up; with more it converges, which may take too many to pay.
    """
    tried, problem = [], problem_of()
    for call in range(calls):
        plan = Auto().plan(problem, experience)
        if plan.chunk < STEPS:
            tried.append(call)
            gives_up = residual > 0.1 and sweeps == 1
            experience.learn(report_of(plan.warmup, residual, fell_back=gives_up, sweeps=sweeps))
    return tried


@pytest.mark.parametrize("sweeps", [1, 4])
def test_it_gives_up_after_few_tries_and_looks_again_ever_more_seldom(sweeps: int) -> None:
    tried = tries(Experience(), 2000, residual=1.0, sweeps=sweeps)
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert pauses, "it never looked again"
    assert pauses[0] >= 8
    assert all(later >= 1.5 * earlier for earlier, later in pairwise(pauses) if later < LONGEST_PAUSE)
    assert LONGEST_PAUSE <= pauses[-1] == pauses[-2] <= LONGEST_PAUSE + 2
    assert len(tried) < 15


def test_the_reason_says_when_it_looks_again() -> None:
    experience = Experience()
    tried = tries(experience, 1, residual=1.0)
    assert tried == [0]
    expected = None
    for call in range(1, 40):
        plan = Auto().plan(problem_of(), experience)
        if plan.chunk < STEPS:
            assert call == expected
            return
        assert "forgets too slowly" in plan.reason
        (wait,) = [int(word) for word in plan.reason.split() if word.isdigit()]
        expected = call + wait
    pytest.fail("it never looked again")


def test_it_takes_shooting_up_again_when_the_network_has_changed() -> None:
    experience = Experience()
    tries(experience, 200, residual=1.0)
    again = tries(experience, 2 * LONGEST_PAUSE, residual=1e-7)
    assert again, "it never looked again"
    assert again[-10:] == list(range(2 * LONGEST_PAUSE - 10, 2 * LONGEST_PAUSE)), (
        "from then on it is used on every call"
    )
    assert experience.setbacks == 0
    assert tries(experience, 30, residual=1.0)[:1] == [0]
    assert experience.pause > 0


def chaotic(steps: int = STEPS) -> tuple[zoo.Network, Tensor, Tensor]:
    net = zoo.network("rnn tanh", "weights×8", n=32, dtype=torch.float32)
    return net, *zoo.data(net, steps, 1, dtype=torch.float32)


def test_real_runs_on_a_chaotic_network() -> None:
    """It is noticed after a few sweeps, finished sequentially, and not tried again at once: forward and backward."""
    net, x, initial = chaotic()
    experience, reports = LayerExperience(), []
    for _ in range(6):
        solution = zoo.solve(net, x, initial, Auto(), experience=experience)
        solution.outputs.sum().backward()
        reports.append(solution.report)
        # In a chaotic network only the beginning can be compared: rounding grows by a factor a step.
        assert zoo.difference(solution.outputs[:8], zoo.truth(net, x[:8], initial)[0]) < 1e-4
    assert reports[0].fell_back
    assert reports[0].iterations <= PATIENCE
    assert all(report.converged for report in reports)
    assert [report.chunk for report in reports[2:]] == [STEPS] * 4
    assert not any(report.fell_back for report in reports[2:])
    assert "forgets too slowly" in reports[-1].reason


def test_auto_raises_where_asked() -> None:
    net, x, initial = chaotic()
    with pytest.raises(tl.ConvergenceError) as caught:
        zoo.solve(net, x, initial, Auto(on_divergence="raise"))
    assert caught.value.report.iterations <= PATIENCE


@pytest.mark.parametrize(("name", "regime"), zoo.cases())
def test_auto_is_the_sequential_result(name: str, regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it decides, on the first call and on those that have learned from it."""
    monkeypatch.setattr(auto_file, "step_cost", lambda *_: StepCost(100.0))
    net = zoo.network(name, regime, n=3)
    steps = 16 if "×8" in regime else 220
    x, initial = zoo.data(net, steps, 2)
    expected, final = zoo.truth(net, x, initial)
    # Over so many steps the strong weights amplify rounding without end: only boundedness is left to compare.
    close = {"weights×8": 1e-6, "weights×4": math.inf, "weights×2": 1e-6}.get(regime, 1e-10)
    experience = LayerExperience()
    for _ in range(3):
        with torch.no_grad():
            solution = zoo.solve(net, x, initial, Auto(), experience=experience)
        assert solution.report.converged
        assert zoo.difference(solution.outputs, expected[..., : solution.outputs.shape[-1]]) < close
        assert zoo.difference(solution.final, final) < close


# ---- in modules -------------------------------------------------------------------------------------------------


def test_a_module_learns_for_each_layer_and_direction() -> None:
    torch.manual_seed(0)
    gru = tl.GRU(3, 8, num_layers=2, bidirectional=True)
    x = torch.randn(2 * STEPS, 1, 3)
    for known in gru.experiences():
        assert known.forward.forgetting is None
        assert known.backward.forgetting is None
    gru(x)[0].sum().backward()
    assert len(gru.reports) == 4
    assert all("learned" in report.reason for report in gru.reports)
    assert all(report.backward is not None for report in gru.reports)
    learned = [known.forward.forgetting for known in gru.experiences()]
    assert len(set(learned)) == 4
    assert not any("memor" in name or "forget" in name for name in gru.state_dict())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda gru: pickle.loads(pickle.dumps(gru))], ids=["copy", "pickle"]
)
def test_what_was_learned_survives_a_copy_and_is_then_its_own(duplicate: object) -> None:
    torch.manual_seed(0)
    gru = tl.GRU(3, 8)
    x = torch.randn(2 * STEPS, 1, 3)
    gru(x)
    twin = duplicate(gru)
    twin(x)
    assert "learned" in twin.reports[0].reason
    with torch.no_grad():
        twin.weight_hh_l0.mul_(20)
    for _ in range(4):
        twin(x)
    assert "forgets too slowly" in twin.reports[0].reason
    gru(x)
    assert "learned" in gru.reports[0].reason


def test_another_solver_starts_afresh() -> None:
    torch.manual_seed(0)
    gru = tl.GRU(3, 8)
    x = torch.randn(2 * STEPS, 1, 3)
    gru(x)
    gru.solver = Shooting(chunk=64)
    gru(x)
    assert gru.reports[0].chunk == 64
    gru.solver = "auto"
    assert not gru.experiences()


def test_unroll_learns_on_a_cell_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_file, "step_cost", lambda *_: StepCost(100.0))
    first, second = zoo.ModuleCell(4), zoo.ModuleCell(4)
    h0, xs = torch.zeros(1, 4), torch.randn(600, 1, zoo.INPUTS, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert "assumed" in tl.unroll(first, h0, xs)[1].reason
        assert "learned" in tl.unroll(first, h0, xs)[1].reason
        assert "assumed" in tl.unroll(second, h0, xs)[1].reason


# ---- long memory on a GPU: several sweeps at once -------------------------------------------------------------------


def corrected_report(sweeps: int, residual: float, fell_back: bool = False) -> SolveReport:
    return SolveReport("shooting[diag]", 16, sweeps, (residual,), 2e-4, True, fell_back, None, 0.0)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as for the kernels of a GPU."""
    monkeypatch.setattr(auto_file, "has_kernels", lambda problem: True)
    monkeypatch.setattr(auto_file, "step_cost", lambda *_: GPU)


@pytest.mark.usefixtures("on_gpu")
def test_a_long_memory_is_corrected_in_several_sweeps() -> None:
    experience = Experience()
    assert Auto().plan(problem_of(16384), experience).sweeps == 1, "nothing is known yet"
    experience.learn(report_of(34, 0.8))
    plan = Auto().plan(problem_of(16384), experience)
    assert (plan.sweeps, plan.correction, plan.warmup) == (auto_file.SWEEPS, "diag", 0)
    assert plan.chunk >= LEAST_CORRECTED
    assert plan.max_iters > plan.sweeps
    assert plan.tolerance == pytest.approx(auto_file.SHARE_OF_JUMPS * Auto().tolerance(problem_of()))
    assert plan.limit == plan.accepts == auto_file.LEAST_ERROR
    given = Auto(tol=1e-4).plan(problem_of(16384), experience)
    assert given.tolerance == given.limit == 1e-4
    ragged = replace(problem_of(16384), lengths=torch.tensor([9000]))
    assert Auto().plan(ragged, experience).sweeps == 1, "its jumps are looked at sweep by sweep"
    experience.learn(report_of(34, 0.5**34))
    assert Auto().plan(problem_of(16384), experience).sweeps == 1, "it forgets quickly: a warm-up is cheaper"


@pytest.mark.usefixtures("on_gpu")
def test_replays_have_a_longer_warm_up_to_try() -> None:
    experience = Experience()
    plan = Auto().plan(problem_of(16384), experience)
    assert plan.retry is not None
    assert plan.retry.warmup == 4 * plan.warmup
    assert not plan.has_missed, "graphs that users capture hold no retry yet"
    experience.note_miss(plan, 1e-5)
    following = Auto().plan(problem_of(16384), experience)
    assert following.has_missed
    assert following.retry is not None
    assert (following.retry.warmup, following.retry.chunk) == (4 * following.warmup, following.chunk)
    slow = Experience()
    slow.learn(report_of(34, 0.8))
    swept = Auto().plan(problem_of(16384), slow)
    assert swept.retry is not None
    assert (swept.retry.warmup, swept.retry.sweeps) == (4 * swept.sweeps * swept.chunk, 1)
    assert swept.retry.limit > swept.tolerance, "a jump's, not that of one among many"
    slow.learn(report_of(34, 0.97))
    slow.counts.note_stretch(4, 12)
    swept = Auto().plan(problem_of(16384), slow)
    assert swept.sweeps == 12
    assert swept.retry is None, "one chunk takes hardly longer"


def test_a_certificate_missed_by_little_is_worth_more_of_the_same() -> None:
    plan = replace(Auto().plan(problem_of(16384), Experience()), chunk=8, warmup=30, tolerance=1e-4)
    longer = plan.insisting(1e-3)
    assert longer is not None
    assert (longer.warmup, longer.sweeps) == (45, 1)
    assert longer.limit == 1e-4 * (1 - 1e-4 ** (8 / 45))  # the rest of an error does not show as a jump
    assert plan.insisting(0.1) is None, "half as long again would leave 0.03"
    assert plan.insisting(math.nan) is None
    corrected = replace(plan, sweeps=7, warmup=0, accepts=1e-4)
    more = corrected.insisting(1e-3)
    assert more is not None
    assert more.sweeps > 7
    assert corrected.insisting(1.0) is None


@pytest.mark.usefixtures("on_gpu")
def test_the_number_of_sweeps_is_learned() -> None:
    experience = Experience()
    experience.learn(report_of(34, 0.8))
    assert Auto().plan(problem_of(16384), experience).sweeps == auto_file.SWEEPS
    experience.learn(corrected_report(9, 1e-4))
    look = Auto().plan(problem_of(16384), experience)
    assert look.sweeps == 1, "a warm-up that takes less time may do"
    assert cost_of(16384, 1, look.chunk, look.warmup, GPU) < cost_of_sweeps(16384, 1, 128, 9, GPU)
    experience.note_miss(look, 0.5)
    assert Auto().plan(problem_of(16384), experience).sweeps == 9
    experience.learn(corrected_report(9, 1e-7))
    assert Auto().plan(problem_of(16384), experience).sweeps == 8, "one was to spare"


@pytest.mark.usefixtures("on_gpu")
def test_where_many_sweeps_are_not_enough_chunks_are_lengthened_and_shortened_again() -> None:
    experience, problem = Experience(), problem_of(16384)
    experience.learn(report_of(34, 0.8))
    shortest, chunks = Auto().plan(problem, experience).chunk, list[int]()
    while (plan := Auto().plan(problem, experience)).chunk < 16384:
        if plan.sweeps > 1:
            chunks.append(plan.chunk // shortest)
        experience.note_miss(plan, 0.9)
    assert chunks == [1, 1, 4, 4, 16], "with more sweeps, one chunk takes less time"
    experience = Experience(counts=SweepCounts(stretch=4))
    experience.learn(report_of(34, 0.99))
    for _ in range(FIRST_LOOK):
        plan = Auto().plan(problem, experience)
        assert plan.chunk == 4 * shortest
        experience.learn(corrected_report(2, 1e-4))
    plan = Auto().plan(problem, experience)
    assert (plan.chunk, plan.sweeps) == (shortest, auto_file.SWEEPS), "not a warm-up at once"


def test_sweeps_that_left_little_are_followed_by_a_few_more() -> None:
    counts = SweepCounts()
    for sweeps, left, more in ((6, 3e-5, 8), (8, 1.1e-5, 10)):
        counts.note_too_few(sweeps, left, 1e-5)
        assert (counts.needed, counts.stretch) == (more, 1), "as fast as the error shrank, and two at least"
    for hopeless in (0.5, 1.0, math.nan):
        counts = SweepCounts()
        counts.note_too_few(16, hopeless, 1e-5)
        assert (counts.needed, counts.stretch, counts.over(1)) == (None, 4, None)


def test_one_solve_far_off_after_many_good_ones_asks_for_more_sweeps_not_for_longer_chunks() -> None:
    """A language model's 11 sweeps were enough for 300 updates, and left an error of 0.3 once: 16 were enough."""
    for solves, found in ((LOOK_AFTER + 1, (16, 1)), (LOOK_AFTER, (None, 4))):
        counts = SweepCounts(needed=11, since_too_few=solves)
        counts.note_too_few(11, 0.33, 1e-5)
        assert (counts.needed, counts.stretch) == found


TILES = RegisterCost(1.0, 128, 132, True)


@pytest.fixture
def on_gpu_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for 128 units: four sequences in chunks of 64 steps are walked in tiles, of 512 steps row by row."""
    monkeypatch.setattr(auto_file, "has_kernels", lambda problem: True)
    monkeypatch.setattr(auto_file, "step_cost", lambda *_: TILES)


def over_longer(needs: dict[int, int], solves: int) -> list[int]:
    """The chunks over which sweeps are tried one after the other, given the sweeps that they need."""
    experience, problem, found = Experience(), problem_of(16384, 4), list[int]()
    experience.learn(report_of(34, 0.99))
    for _ in range(solves):
        for _ in range(8):
            plan = Auto().plan(problem, experience)
            if plan.sweeps == 1:
                break
            found += [plan.chunk] if found[-1:] != [plan.chunk] else []
            if plan.sweeps >= needs[plan.chunk]:
                break
            experience.note_miss(plan, 1e-3)
        if plan.sweeps == 1:  # a look at a warm-up, which is not enough
            experience.note_miss(plan, 0.5)
            continue
        experience.learn(replace(corrected_report(plan.sweeps, 9e-5), chunk=plan.chunk))
    return found


@pytest.mark.usefixtures("on_gpu_in_tiles")
def test_longer_chunks_are_swept_if_that_takes_less_time() -> None:
    few, many = ({64: sweeps, 128: 9, 256: 7, 512: 4, 1024: 3} for sweeps in (5, 16))
    assert cost_of_sweeps(16384, 4, 512, 4, TILES) < cost_of_sweeps(16384, 4, 64, 16, TILES)
    assert over_longer(few, 40) == [64], "five sweeps take less time"
    assert over_longer(many, 40) == [64, 512]


@pytest.mark.usefixtures("on_gpu_in_tiles")
def test_longer_chunks_that_do_not_pay_are_left_for_a_while() -> None:
    needs = {64: 16, 128: 16, 256: 16, 512: 12, 1024: 12}
    found = over_longer(needs, KNOWN_FOR)
    assert found[0] == found[-1] == 64
    assert len(found) <= 2 * len(needs), "each is tried once"
    assert len(over_longer(needs, 2 * KNOWN_FOR)) > len(found), "training may have changed that"


def test_after_a_failure_a_sweep_less_must_be_to_spare_for_a_while() -> None:
    """Batches that take turns need different numbers of sweeps, and one too few costs a whole call."""
    counts = SweepCounts()
    for needed in (8, 7, 6):
        counts.learn(corrected_report(needed + 1, 1e-7))
        assert counts.needed == needed, "at once before any failure"
    counts.note_too_few(6, 3e-5, 1e-5)
    counts.too_few = 0
    for call in range(3 * SPARE_SOLVES):
        assert counts.needed is not None
        counts.learn(corrected_report(counts.needed, 1e-4 if call in (0, 5) else 1e-7))
        assert counts.needed == 8 - (call >= 5 + SPARE_SOLVES) - (call >= 5 + 2 * SPARE_SOLVES)


def test_many_sweeps_too_many_are_given_up_by_half_of_what_is_to_spare() -> None:
    counts = SweepCounts(has_failed=True)
    for left in (*(SPARE_SOLVES - 1) * [1e-18], 1e-14):
        assert counts.needed in (None, 30)
        counts.learn(corrected_report(30, left))
    assert counts.needed == 21, "10.1 would have shrunk the largest of these errors to what is to spare"


@pytest.mark.usefixtures("on_gpu")
def test_few_sweeps_for_a_while_are_a_reason_to_look_afresh() -> None:
    """The network may forget quickly again; where it does not, the next look is further away."""
    experience, looks = Experience(), []
    for call in range(200):
        plan = Auto().plan(problem_of(16384), experience)
        if plan.sweeps == 1:
            looks.append(call)
            experience.learn(replace(report_of(34, 0.8), iterations=3))  # it does not
        else:
            experience.learn(corrected_report(2, 1e-4))
    first = FIRST_LOOK
    assert looks == [0, 1 + first, 2 + 3 * first, 3 + 7 * first, 4 + 15 * first]
    experience.learn(report_of(34, 0.5**34))
    assert experience.counts.look_after == first, "a warm-up was enough"


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("earlier", [SolveReport.sequential(20, ""), report_of(34, 1e-7)])
def test_reports_of_plans_before_the_last_tell_no_sweeps(earlier: SolveReport) -> None:
    """Backward passes may all come at the end: of a short call, and of a long one that was planned behind it."""
    experience = Experience()
    experience.learn(report_of(34, 0.8))
    assert Auto().plan(problem_of(16384), experience).sweeps == auto_file.SWEEPS
    experience.learn(corrected_report(9, 1e-4))
    experience.learn(earlier)
    assert experience.counts.needed == 9


def test_sweeps_that_give_up_twice_are_not_tried_for_a_while() -> None:
    experience = Experience()
    for expected in (0, FIRST_PAUSE):
        experience.learn(report_of(48, 0.9, fell_back=True))
        assert experience.pause == expected
    experience.correcting = True
    experience.learn(corrected_report(12, 1.0, fell_back=True))
    assert experience.pause == 2 * FIRST_PAUSE


# ---- cuDNN or sweeps, by a problem's size ----------------------------------------------------------------------------


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Inputs that look as if they were on a GPU of 132 multiprocessors."""
    monkeypatch.setattr(cudnn, "fits", lambda *_: True)
    monkeypatch.setattr(cudnn, "capturing", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return SimpleNamespace(device=torch.device("cuda", 7), dtype=torch.float32)


def why_cudnn(layer: Any, data: Any, steps: int, batch: int) -> str | None:
    """Why cuDNN's layer is to run, by what is known of this one."""
    return cudnn.why(layer, data, steps, batch, layer.experiences())


@pytest.mark.parametrize(
    ("steps", "batch", "hidden", "reason"),
    [
        (16384, 1, 32, None),
        (16384, 16, 128, None),
        (4096, 512, 128, None),
        (256, 1, 512, None),
        (1024, 1, 32, "too few"),
        (2048, 1, 32, None),
        (1024, 64, 128, None),
        (64, 512, 32, "too few"),
        (64, 1, 512, "too few"),
        (256, 512, 1024, "one chunk is cheapest"),
    ],
)
def test_cudnn_runs_where_it_is_faster(h200: Any, steps: int, batch: int, hidden: int, reason: str | None) -> None:
    """As measured on an H200: benchmarks/results/gpu-grid.md."""
    found = why_cudnn(tl.GRU(4, hidden), h200, steps, batch)
    assert found is None if reason is None else reason in str(found)


def test_cudnns_time_goes_by_cell_precision_and_passes(h200: Any) -> None:
    """As measured on an H200: benchmarks/results/gpu.md and gpu-half.md."""
    halved = SimpleNamespace(device=h200.device, dtype=torch.float16)
    for make, data, few in ((tl.GRU, h200, 800), (tl.LSTM, h200, 900), (tl.RNN, h200, 1150), (tl.GRU, halved, 900)):
        layer = make(4, 128)
        assert "too few" in str(why_cudnn(layer, data, few, 1))
        assert why_cudnn(layer, data, few + 100, 1) is None
    layer = tl.GRU(4, 32)
    assert why_cudnn(layer, h200, 512, 256) is None
    with torch.no_grad():  # cuDNN takes 0.5 ms
        assert "too few" in str(why_cudnn(layer, h200, 512, 256))
        assert why_cudnn(layer, h200, 4096, 256) is None


def test_without_kernels_narrow_layers_are_cudnns(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "fits", lambda *_: False)
    assert "in one kernel" in str(why_cudnn(tl.GRU(4, 32), h200, 16384, 1))
    assert "too few" in str(why_cudnn(tl.GRU(4, 512), h200, 2048, 1))
    assert why_cudnn(tl.GRU(4, 512), h200, 16384, 1) is None


@pytest.mark.parametrize("captured", [False, True])
def test_a_network_that_rests_stays_with_weights_in_registers(
    h200: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk by such kernels is faster than cuDNN."""
    monkeypatch.setattr(cudnn, "capturing", lambda _: captured)
    for hidden in (32, 512):
        layer = tl.GRU(4, hidden)
        layer._experiences.setdefault(0, LayerExperience()).forward.pause = 9
        assert why_cudnn(layer, h200, 16384, 1) is None


def test_cudnn_is_not_asked_for_what_it_refuses(h200: Any) -> None:
    layer = tl.GRU(4, 1024)
    experience = layer._experiences.setdefault(0, LayerExperience()).forward
    experience.pause = 9
    assert why_cudnn(layer, h200, 65535, 1) == cudnn.RESTING
    assert why_cudnn(layer, h200, 65536, 1) is None
    assert why_cudnn(layer, h200, 65536, 4096) is None, "one chunk is cheapest, and ours"
    assert experience.pause == 8, "left to the sweeps, which rest on their own account"


def test_a_wide_network_that_rests_is_cudnns_for_a_while(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our launches, one a step, are no faster than its own; but a graph cannot hold what it makes on a first call."""
    layer = tl.GRU(4, 1024)
    experience = layer._experiences.setdefault(0, LayerExperience())
    experience.forward.pause = 2
    answers = [why_cudnn(layer, h200, 16384, 1) for _ in range(4)]
    assert answers == [cudnn.RESTING] * 2 + [None] * 2
    experience.forward.pause = 2
    monkeypatch.setattr(cudnn, "capturing", lambda _: True)
    assert why_cudnn(layer, h200, 16384, 1) is None


@pytest.mark.usefixtures("on_gpu")
def test_a_long_warmup_grants_what_rounding_adds_up_to() -> None:
    """Of an error that a warm-up of many chunks leaves, only a part shows as a jump; but what float32 itself adds up to
    over such a memory is no reason to run in one chunk.
    """
    experience = Experience(counts=SweepCounts(TOO_MANY))  # corrections were not enough
    experience.learn(report_of(3328, 5e-7))
    plan = Auto().plan(problem_of(16384), experience)
    assert plan.warmup > 8 * plan.chunk
    assert plan.limit == plan.tolerance
    strict = replace(plan, accepts=0.0)
    assert strict.limit < 0.5 * plan.tolerance
    endless = replace(plan, chunk=1)
    assert endless.limit < plan.tolerance, "an error of 1e-5 is too much in any case"


def test_without_kernels_what_rests_is_torchs_on_a_cpu() -> None:
    """One chunk of torch operations is slower than torch's own layer, which runs until the next look."""
    gru, x = tl.GRU(2, 3).double(), torch.randn(thresholds.SHORTEST_IN_TORCH + 50, 1, 2, dtype=torch.float64)
    gru(x)
    (experience,) = gru.experiences()
    experience.forward.pause = 2
    for left in (1, 0):
        y, _ = gru(x)
        assert thresholds.RESTING in gru.reports[0].reason
        assert gru.reports[0].ran_in_torch
        assert experience.forward.pause == left
    own, _ = gru(x)
    assert not gru.reports[0].ran_in_torch
    torch.testing.assert_close(own, y)


def test_an_lstm_in_float64_gains_later_without_gradients() -> None:
    lstm = tl.LSTM(2, 3).double()
    for steps, in_torch in ((thresholds.SHORTEST_LSTM_IN_TORCH - 1, True), (thresholds.SHORTEST_LSTM_IN_TORCH, False)):
        x = torch.randn(steps, 1, 2, dtype=torch.float64)
        with torch.no_grad():
            lstm(x)
        assert lstm.reports[0].ran_in_torch == in_torch
