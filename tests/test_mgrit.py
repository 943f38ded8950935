"""Multigrid in time against the plain loop in float64: states, every gradient, and reports that tell the truth."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import timeloom as tl
from timeloom.solve.driver import WORTH_MENDING
from timeloom.solve.tolerance import ADJOINT_TOLERANCE, TOLERANCE
from timeloom.solvers import MGRIT, Auto, Shooting, Solver

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH = 37, 3

SETTINGS: dict[str, MGRIT] = {
    "two levels": MGRIT(levels=2, coarsening=5),
    "four levels": MGRIT(levels=4, coarsening=2),
    "uneven factors": MGRIT(coarsening=(3, 2)),
    "F-relaxation": MGRIT(coarsening=4, relaxation="F"),
    "F above, FCFCF below": MGRIT(levels=3, coarsening=3, relaxation=("F", "FCFCF")),
    "weighted": MGRIT(levels=3, coarsening=3, weight=0.8),
    "F-cycles": MGRIT(levels=4, coarsening=2, cycle="F"),
    "skip down": MGRIT(levels=3, coarsening=3, skip_down=True),
    "no guess": MGRIT(levels=3, coarsening=3, guess="initial"),
    "nested guess": MGRIT(levels=4, coarsening=2, guess="nested"),
    "injected inputs": MGRIT(levels=3, coarsening=3, coarse_inputs="inject"),
}
GATED = ("gru", "implicit gru")


def accuracy(regime: str) -> float:
    """What rounding may come to over a run in float64; the strongest weights make some networks chaotic."""
    return {"weights×8": 1e-7, "weights×4": 1e-9}.get(regime, 1e-11)


def check(
    net: zoo.Network,
    solver: Solver,
    close: float = 1e-11,
    steps: int = STEPS,
    batch: int = BATCH,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    loss: str = "both",
) -> zoo.Solution:
    """Outputs and all gradients against the plain loop."""
    x, initial = zoo.data(net, steps, batch)
    solution = zoo.check_against_truth(net, x, initial, solver, close, loss, lengths, resets)
    assert solution.report.converged
    assert solution.report.backward is not None
    assert solution.report.backward.converged
    return solution


@pytest.mark.parametrize(("name", "regime"), zoo.cases())
def test_states_and_gradients_are_the_plain_loops(name: str, regime: str) -> None:
    net = zoo.network(name, regime)
    for solver in (SETTINGS["two levels"], SETTINGS["four levels"]):
        check(net, solver, accuracy(regime))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["gru", "implicit gru", "lstm", "rnn tanh", "function of tuple"])
def test_every_setting_converges_to_the_same(name: str, setting: str) -> None:
    report = check(zoo.network(name), SETTINGS[setting]).report
    assert report.solver.startswith("mgrit")
    assert not report.fell_back, report
    assert not report.backward.fell_back, report


@pytest.mark.parametrize("name", GATED)
def test_implicit_coarse_steps(name: str) -> None:
    for regime in ("default", "gate+4", "weights×2"):
        check(zoo.network(name, regime), MGRIT(levels=3, coarsening=3, coarse="implicit"))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_lengths_and_resets(name: str) -> None:
    """Sequences of no step, of one, of some and of all; states put back to the initial one, at chunk edges too."""
    net = zoo.network(name)
    lengths = torch.tensor([0, 1, 19, STEPS, 24])
    resets = torch.zeros(STEPS, 5, dtype=torch.bool)
    resets[0, 3] = resets[6, 2] = resets[6, 3] = resets[7, 3] = resets[20, 4] = resets[30, 3] = True
    resets[34, 1] = True  # past its end
    for setting in ("uneven factors", "four levels", "skip down"):
        solver = SETTINGS[setting]
        check(net, solver, batch=5, lengths=lengths, resets=resets)
        check(net, solver, batch=5, lengths=lengths)
        check(net, solver, batch=5, resets=resets)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 16, 17, 31])
@pytest.mark.parametrize("name", ["gru", "lstm", "elementwise"])
def test_any_length(name: str, steps: int) -> None:
    """No divisibility rule; one sequence, fewer steps than a chunk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(zoo.network(name), MGRIT(levels=3, coarsening=4), steps=steps, batch=1)
    check(zoo.network(name), MGRIT(), steps=steps, batch=1)


@pytest.mark.parametrize("loss", ["outputs", "last"])
def test_losses_on_all_states_and_on_the_last(loss: str) -> None:
    for setting in ("four levels", "skip down"):
        check(zoo.network("gru", "gate+4"), SETTINGS[setting], loss=loss)


@pytest.mark.parametrize("solver", [Auto(adjoint="mgrit"), Shooting(chunk=5, adjoint="mgrit")])
def test_adjoint_by_multigrid_beside_another_forward_solver(solver: Solver) -> None:
    solution = check(zoo.network("gru", "gate+4"), solver, steps=300)
    assert not solution.report.solver.startswith("mgrit")
    assert solution.report.backward.solver.startswith("mgrit")


def test_a_sequential_adjoint() -> None:
    report = check(zoo.network("gru"), MGRIT(coarsening=4, adjoint="sequential")).report
    assert report.solver.startswith("mgrit")
    assert report.backward.solver == "sequential"


# ---- float32 and modules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn tanh"])
@pytest.mark.parametrize("coarsening", [None, 16])
def test_float32_gradients_are_those_of_float64(name: str, coarsening: int | None) -> None:
    """By the compiled sweeps where there are any: 1e-5 of each gradient's largest entry."""
    steps, n = 1500, 16
    net = zoo.network(name, n=n, dtype=torch.float32)
    x, initial = zoo.data(net, steps, 1, dtype=torch.float32)
    solution = zoo.solve(net, x, initial, MGRIT(coarsening=coarsening))
    given = zoo.gradients(net, x, initial, solution.outputs, solution.final)
    assert solution.report.solver.startswith("mgrit")
    assert not solution.report.fell_back
    wide = zoo.network(name, n=n)
    with torch.no_grad():
        for key, parameter in wide.parameters.items():
            parameter.copy_(net.parameters[key])
    x64, initial64 = (value.detach().double().requires_grad_() for value in (x, initial))
    states, final = zoo.truth(wide, x64, initial64)
    outputs = states[..., : solution.outputs.shape[-1]]
    expected = zoo.gradients(wide, x64, initial64, outputs, final)
    assert zoo.difference(solution.outputs.double(), outputs) < 1e-5
    for key in expected:
        assert zoo.difference(given[key].double(), expected[key]) < 1e-5, key


@pytest.mark.parametrize("solver", ["mgrit", MGRIT(coarsening=3)])
def test_a_module_takes_it(solver: Any) -> None:
    torch.manual_seed(0)
    theirs = nn.GRU(3, 5, num_layers=2, bidirectional=True, dtype=torch.float64)
    ours = tl.GRU(3, 5, num_layers=2, bidirectional=True, dtype=torch.float64, solver=solver)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(41, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-13)
    tl.parallelize(theirs, solver)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)


# ---- convergence ------------------------------------------------------------------------------------------------


def residual_counts(steps: int, solver: MGRIT) -> tuple[int, int]:
    torch.manual_seed(0)
    gru = tl.GRU(16, 16, solver=solver)
    with torch.no_grad():
        gru.bias_ih_l0[16:32] += 6
    output, _ = gru(torch.randn(steps, 1, 16))
    output.sum().backward()
    report = gru.reports[0]
    assert not report.fell_back
    assert not report.backward.fell_back
    return report.iterations, report.backward.iterations


def test_cycles_hardly_grow_with_the_length_in_long_memory() -> None:
    short, long = (residual_counts(steps, MGRIT(tol=1e-5)) for steps in (1024, 16384))
    assert long[0] <= short[0] + 2
    assert long[1] <= short[1] + 2


def test_coarse_levels_carry_what_relaxation_cannot() -> None:
    """Long memory, 64 chunks: relaxation alone does not contract, multigrid takes a few cycles."""
    net = zoo.network("gru", "gate+6", n=8)
    x, initial = zoo.data(net, 512, 1)
    alone = zoo.solve(net, x, initial, Shooting(chunk=8, correction="none", warmup=0, tol=1e-6)).report
    cycles = zoo.solve(net, x, initial, MGRIT(coarsening=(8, 4), tol=1e-6, guess="initial")).report
    assert alone.fell_back
    assert not cycles.fell_back
    assert cycles.iterations <= 5


def test_the_integrators_coarse_steps_are_exact() -> None:
    """`h⁺ = h + x` keeps everything, and a coarse step of mean inputs sums them: the first guess is the answer."""
    x = torch.randint(1, 4, (64, 2, 3), generator=torch.Generator().manual_seed(0)).double()
    states, report = tl.unroll(
        lambda h, x: h + x, torch.ones(2, 3, dtype=torch.float64), x, MGRIT(coarsening=4, guess="nested")
    )
    torch.testing.assert_close(states, 1 + x.cumsum(0), rtol=1e-14, atol=0)
    assert report.iterations == 1
    assert report.residuals[0] <= 1e-14


def test_exact_after_half_as_many_cycles_as_chunks() -> None:
    """FCF makes two more chunks exact in each cycle, whatever the coarse step: here one that is nonsense."""
    net = zoo.network("gru")
    x, initial = zoo.data(net, 40, 2)
    noise = MGRIT(levels=2, coarsening=4, guess="initial", coarse=lambda h, x, span: 0.9 * h.flip(-1), max_iters=10)
    problem = net.recurrence(x, initial)
    report = zoo.solve(net, x, initial, noise).report
    assert problem.steps // 4 == 10
    assert report.iterations <= 5
    assert not report.fell_back


def test_a_correction_that_makes_things_worse_is_taken_back() -> None:
    """Strong recurrent weights: a fixed number of cycles diverges, cycles to tolerance go on by relaxation."""
    results = {}
    for cycles in (None, 15):
        torch.manual_seed(0)
        solver = MGRIT(levels=3, coarsening=4, coarse="implicit", cycles=cycles, tol=1e-8, on_divergence="ignore")
        gru = tl.GRU(32, 32, dtype=torch.float64, solver=solver)
        with torch.no_grad():
            gru.weight_hh_l0 *= 3
        gru(torch.randn(128, 4, 32, dtype=torch.float64))[1].sum().backward()
        results[cycles] = gru.reports[0]
    assert results[None].converged
    assert results[None].backward.converged
    assert results[15].residuals[-1] > 0.01


def test_a_warmup_may_be_enough() -> None:
    """A GRU that forgets within it is solved by one sweep, and the report says whose."""
    torch.manual_seed(0)
    gru = tl.GRU(8, 8, solver=MGRIT(tol=1e-5, coarsening=64))
    gru(torch.randn(640, 2, 8))[0].sum().backward()
    for report in (gru.reports[0], gru.reports[0].backward):
        assert report.solver == "mgrit[V, 2 levels]"
        assert report.warmup >= 40
        assert report.converged
        assert report.residuals[-1] <= 1e-5


def test_coarse_levels_are_freed_with_their_call() -> None:
    """At once: nothing collects garbage because a GPU's memory is short."""
    layer, x = tl.GRU(3, 8, solver=MGRIT(coarsening=8, guess="initial")), torch.randn(400, 2, 3)
    layer(x)[0].sum().backward()

    def held() -> int:
        return sum(type(one) is Tensor and one.dtype == torch.float64 for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = held()
        layer(x)[0].sum().backward()
        assert layer.reports[0].levels
        assert held() == before
    finally:
        gc.enable()


def test_an_easy_network_needs_no_coarse_level() -> None:
    """One that forgets within a chunk: FCF is enough, and the report says so."""
    net = zoo.network("rnn tanh", n=2)
    x, initial = zoo.data(net, 512, 1)
    report = zoo.solve(net, x, initial, MGRIT(coarsening=128, tol=1e-9, guess="initial")).report
    assert report.iterations == 1
    assert report.levels == ((report.residuals[0],),)


# ---- reports ----------------------------------------------------------------------------------------------------


def test_a_report_tells_what_happened() -> None:
    net = zoo.network("gru", "gate+4")
    x, initial = zoo.data(net, 128, 2)
    solution = zoo.solve(net, x, initial, MGRIT(levels=4, coarsening=2, cycle="F"))
    solution.outputs.sum().backward()
    report = solution.report
    for one, tolerance in ((report, TOLERANCE), (report.backward, ADJOINT_TOLERANCE)):
        assert one.solver == "mgrit[F, 4 levels]"
        assert one.chunk == 2
        assert one.iterations == len(one.residuals) == len(one.levels) > 2
        assert one.tolerance == tolerance[torch.float64]
        met = sum(residual <= one.tolerance for residual in one.residuals)
        assert met in (1, 2), "one cycle more where jumps add up, or to polish gradients"
        assert 0 < one.error_estimate <= WORTH_MENDING * one.tolerance
        assert one.residuals[-1] <= one.tolerance < one.residuals[-1 - met]
        assert one.contraction == one.residuals[-1] / one.residuals[-2]
        assert [levels[0] for levels in one.levels] == list(one.residuals)
        assert len(one.levels[0]) == 3, "fine, level 1 and level 2; the coarsest is solved exactly"
        assert all(math.isfinite(value) for levels in one.levels for value in levels)
        assert one.advice == ""
        assert "coarsened by 2, 2, 2; frozen coarse steps of mean inputs" in one.reason
    assert "mgrit[F, 4 levels], chunk 2" in str(report)
    assert f"{report.iterations} cycles: converged" in str(report)
    assert f"last factor {report.contraction:.2g}" in str(report)


def test_a_looser_tolerance_is_met_and_saves_cycles() -> None:
    net = zoo.network("gru", "gate+4")
    x, initial = zoo.data(net, 128, 2)
    states, _ = zoo.truth(net, x, initial)
    strict = zoo.solve(net, x, initial, MGRIT(coarsening=4)).report
    for tol in (1e-3, 1e-6):
        solution = zoo.solve(net, x, initial, MGRIT(coarsening=4, tol=tol))
        assert solution.report.residuals[-1] <= tol
        assert solution.report.iterations < strict.iterations
        assert 1e-13 < zoo.difference(solution.outputs, states) < 100 * tol


def chaotic() -> tuple[zoo.Network, Tensor, Tensor]:
    net = zoo.network("rnn tanh", "weights×8", n=8)
    return (net, *zoo.data(net, 300, 2))


def test_what_does_not_contract_is_finished_sequentially() -> None:
    net, x, initial = chaotic()
    solution = zoo.solve(net, x, initial, MGRIT(coarsening=4))
    states, _ = zoo.truth(net, x[:40], initial)
    assert solution.report.fell_back
    assert solution.report.converged
    assert "gave up" in solution.report.reason
    assert "to blame" in solution.report.advice
    assert zoo.difference(solution.outputs[:40], states) < 1e-6


def test_a_failure_is_raised_or_ignored_when_asked() -> None:
    net, x, initial = chaotic()
    with pytest.raises(tl.ConvergenceError, match=r"cycles of 4-step chunks .* is to blame: .* Try relaxation="):
        zoo.solve(net, x, initial, MGRIT(coarsening=4, on_divergence="raise"))
    report = zoo.solve(net, x, initial, MGRIT(coarsening=4, on_divergence="ignore")).report
    assert not report.converged
    assert not report.fell_back
    assert report.residuals[-1] > report.tolerance


def test_a_lower_level_is_blamed_where_it_is_to_blame() -> None:
    """Coarse steps that are exact from the fine grid to level 1, and nonsense from there on."""

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return h + x

    def coarse(h: Tensor, x: Tensor, span: Tensor) -> Tensor:
        return torch.where(span > 4, -1.5 * h, h + span * x)

    x = torch.randn(256, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h0 = torch.zeros(1, 2, dtype=torch.float64)
    solver = MGRIT(levels=3, coarsening=4, relaxation="F", coarse=coarse, guess="initial", on_divergence="ignore")
    _, report = tl.unroll(cell, h0, x, solver)
    assert not report.converged
    assert report.advice.startswith("Level 1 is to blame")
    assert "relaxation='FCF' there" in report.advice


def test_a_fixed_number_of_cycles_is_kept() -> None:
    net = zoo.network("gru", "gate+4")
    x, initial = zoo.data(net, 200, 2)
    solution = zoo.solve(net, x, initial, MGRIT(coarsening=4, cycles=3, backward_cycles=2, on_divergence="ignore"))
    solution.outputs.sum().backward()
    assert (solution.report.iterations, solution.report.backward.iterations) == (3, 2)
    assert not solution.report.converged
    assert "stopped after 3 cycles, as asked for: inexact" in solution.report.reason
    exact = check(net, MGRIT(coarsening=4, cycles=3, backward_cycles=2), steps=200, batch=2).report
    assert exact.fell_back


# ---- the paper's setting, and the gradient monitor -----------------------------------------------------------------


def paper_gradients(**changes: Any) -> tuple[tl.ImplicitGRU, tl.GradientCheck]:
    torch.manual_seed(0)
    network = tl.ImplicitGRU(8, 8, dtype=torch.float64, solver=MGRIT.paper(check_gradient_every=1, **changes))
    _, last = network(torch.randn(128, 4, 8, dtype=torch.float64))
    last.sum().backward()
    return network, network.reports[0].backward.gradient


def test_the_papers_setting_is_inexact_and_says_so() -> None:
    network, gradient = paper_gradients()
    report = network.reports[0]
    assert report.solver == "mgrit[V, 3 levels]"
    assert (report.iterations, report.backward.iterations) == (2, 1)
    assert not report.converged
    assert not report.backward.converged
    assert 0.05 < gradient.error < 0.6
    assert 0.9 < gradient.cosine < 0.9999
    given = network.weight_hh_l0.grad.clone()
    network.solver, network.weight_hh_l0.grad = "sequential", None
    torch.manual_seed(0)
    tl.ImplicitGRU(8, 8, dtype=torch.float64)  # draws what the network drew
    _, last = network(torch.randn(128, 4, 8, dtype=torch.float64))
    last.sum().backward()
    by_hand = float((given - network.weight_hh_l0.grad).norm() / network.weight_hh_l0.grad.norm())
    assert by_hand == pytest.approx(gradient.error, rel=0.1)  # which also counts b_hn


def test_more_cycles_and_better_coarse_steps_come_closer() -> None:
    errors = [paper_gradients(cycles=k, backward_cycles=k)[1].error for k in (1, 2, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3
    ours = paper_gradients(cycles=4, backward_cycles=4, coarse="frozen", coarse_inputs="mean")[1].error
    assert ours < 0.5 * errors[2]


def test_an_exact_gradient_is_found_exact() -> None:
    _, gradient = paper_gradients(cycles=None, backward_cycles=None, relaxation="FCF")
    assert gradient.error < 1e-13
    assert gradient.cosine == pytest.approx(1, abs=1e-13)
    assert not gradient.too_far


def test_gradients_are_compared_now_and_then_and_cycles_tightened() -> None:
    torch.manual_seed(0)
    gru = tl.GRU(8, 8, solver=MGRIT.paper(check_gradient_every=2, gradient_tolerance=0.02, skip_down=False))
    x = torch.randn(128, 4, 8)
    seen = []
    for _ in range(12):
        gru(x)[1].sum().backward()
        report = gru.reports[0]
        seen.append((report.iterations, report.backward.iterations, report.backward.gradient))
    assert [gradient is not None for *_, gradient in seen] == [False, True] * 6
    assert seen[0][:2] == (2, 1)
    errors = [gradient.error for *_, gradient in seen[1::2]]
    assert errors[0] > 0.02 >= errors[-1]
    assert seen[2][:2] == (3, 2), "one cycle more in both passes after a gradient that was too far off"
    assert seen[-1][0] - 2 == sum(error > 0.02 for error in errors)
    assert "gradient off by" in str(gru.reports[0])


def test_a_generic_cells_gradient_is_compared_by_its_adjoints() -> None:
    net = zoo.network("function", "gate+4")
    x, initial = zoo.data(net, 64, 2)
    solver = MGRIT(coarsening=4, check_gradient_every=1, backward_cycles=1, on_divergence="ignore")
    solution = zoo.solve(net, x, initial, solver)
    solution.outputs.sum().backward()
    assert 1e-6 < solution.report.backward.gradient.error < 0.5


def test_a_fixed_number_of_cycles_keeps_sequences_apart() -> None:
    """What is not finite in one sequence changes no other, and is carried on as in a plain run."""
    torch.manual_seed(0)
    layer = tl.GRU(3, 4, solver=MGRIT.paper())
    x = torch.randn(400, 2, 3)
    with torch.no_grad():
        before, _ = layer(x)
        x[150, 0] = torch.nan
        after, _ = layer(x)
    assert torch.equal(after[:, 1], before[:, 1])
    assert bool(after[:150, 0].isfinite().all())
    assert bool(after[150:, 0].isnan().all())
    assert "converging" not in str(layer.reports[0])
