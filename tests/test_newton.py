"""The Newton family against the plain loop in float64: states, gradients, sweeps, and what tells the methods apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import zoo
from test_shooting import accuracy
from torch import Tensor, nn

import timeloom as tl
from timeloom.cells import GRUCell
from timeloom.kernels.cpu import build
from timeloom.scan import linear_scan
from timeloom.solve.damping import Damping
from timeloom.solvers import DEER, ELK, Jacobi, Picard, QuasiDEER, QuasiELK, Shooting, Solver

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH = 17, 3
FAMILY: dict[str, Solver] = {
    "deer": DEER(),
    "quasi-deer": QuasiDEER(),
    "elk": ELK(),
    "quasi-elk": QuasiELK(),
    "picard": Picard(),
    "jacobi": Jacobi(),
}


def sweeps(net: zoo.Network, x: Tensor, initial: Tensor, solver: Solver) -> int:
    """Sweeps until the solver met its tolerance by itself."""
    with torch.no_grad():
        report = zoo.solve(net, x, initial, solver).report
    assert report.converged
    assert not report.fell_back
    return report.iterations


@pytest.mark.parametrize("solver", FAMILY)
@pytest.mark.parametrize(("name", "regime"), zoo.cases())
def test_states_and_gradients_are_the_plain_loops(name: str, regime: str, solver: str) -> None:
    net = zoo.network(name, regime)
    x, initial = zoo.data(net, STEPS, BATCH)
    report = zoo.check_against_truth(net, x, initial, FAMILY[solver], accuracy(regime)).report
    assert report.solver == solver
    assert report.chunk == 1
    assert report.converged
    assert report.backward is not None
    assert report.backward.converged


@pytest.mark.parametrize("solver", FAMILY)
@pytest.mark.parametrize("name", ["gru", "lstm", "lstm projected", "function of tuple"])
def test_lengths_and_resets(name: str, solver: str) -> None:
    net = zoo.network(name)
    x, initial = zoo.data(net, STEPS, 5)
    lengths, resets = zoo.marks(STEPS)
    zoo.check_against_truth(net, x, initial, FAMILY[solver], 1e-11, lengths=lengths, resets=resets)
    zoo.check_against_truth(net, x, initial, FAMILY[solver], 1e-11, lengths=lengths)
    zoo.check_against_truth(net, x, initial, FAMILY[solver], 1e-11, resets=resets)


@pytest.mark.parametrize("solver", FAMILY)
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (2, 1), (33, 1), (1, 4)])
def test_small_and_odd_sizes(steps: int, batch: int, solver: str) -> None:
    for name in ("gru", "lstm", "elementwise"):
        net = zoo.network(name, n=3)
        x, initial = zoo.data(net, steps, batch)
        for loss in ("outputs", "last"):
            zoo.check_against_truth(net, x, initial, FAMILY[solver], 1e-12, loss)


@pytest.mark.parametrize("solver", FAMILY)
def test_names_and_objects_mean_the_same(solver: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 2, 3)
    named, given = tl.GRU(3, 4, solver=solver), tl.GRU(3, 4, solver=FAMILY[solver])
    given.load_state_dict(named.state_dict())
    assert torch.equal(named(x)[0], given(x)[0])
    assert named.reports[0].solver == solver
    assert solver in str(named.reports[0])


@pytest.mark.parametrize("layer", [tl.GRU, tl.LSTM, tl.RNN])
def test_modules_in_float32_are_as_accurate_as_torchs(layer: type[nn.RNNBase]) -> None:
    """Outputs and every gradient against float64, over a length at which errors have had time to grow."""
    torch.manual_seed(0)
    module = layer(3, 8, num_layers=2, bidirectional=True, solver="deer")
    torch_layer = {tl.GRU: nn.GRU, tl.LSTM: nn.LSTM, tl.RNN: nn.RNN}[layer]
    x = torch.randn(400, 2, 3)

    def run(kind: type[nn.RNNBase], dtype: torch.dtype) -> list[Tensor]:
        other = module if kind is layer else kind(3, 8, num_layers=2, bidirectional=True).to(dtype)
        other.load_state_dict(module.state_dict())
        other.zero_grad()
        inputs = x.to(dtype).requires_grad_()
        y, _ = other(inputs)
        y.square().mean().backward()
        return [y.detach().clone(), inputs.grad, *(p.grad.clone() for p in other.parameters())]

    truth, ours, theirs = run(torch_layer, torch.float64), run(layer, torch.float32), run(torch_layer, torch.float32)
    for i, (exact, own, other) in enumerate(zip(truth, ours, theirs, strict=True)):
        assert zoo.difference(own, exact) < 2 * zoo.difference(other, exact) + (1e-6 if i else 1e-7)


def test_float32_is_polished() -> None:
    """Jumps of the tolerance at every step add up, so what just meets it is corrected again, until that does, too, or
    is rounding: soon.
    """
    net = zoo.network("gru", "gate+4", n=8, dtype=torch.float32)
    x, initial = zoo.data(net, 1000, 2, dtype=torch.float32)
    for solver in (DEER(), QuasiDEER(), ELK()):
        with torch.no_grad():
            report = zoo.solve(net, x, initial, solver).report
            as_asked = zoo.solve(net, x, initial, replace(solver, tol=1e-6)).report
        assert report.converged
        assert not report.fell_back
        met = [residual <= report.tolerance for residual in report.residuals]
        again = len(met) - 1 - met.index(True)
        assert 1 <= again <= 4
        assert met.index(True) < as_asked.iterations


# ---- what tells the methods apart ----------------------------------------------------------------------------------


def test_better_derivatives_need_fewer_sweeps() -> None:
    net = zoo.network("gru", n=8)
    x, initial = zoo.data(net, 300, 2)
    deer, quasi, jacobi = (sweeps(net, x, initial, solver) for solver in (DEER(), QuasiDEER(), Jacobi()))
    assert deer < quasi < jacobi
    assert deer <= 7


def test_newton_converges_quadratically() -> None:
    net = zoo.network("gru", n=8)
    x, initial = zoo.data(net, 300, 1)
    with torch.no_grad():
        residuals = zoo.solve(net, x, initial, DEER()).report.residuals
    last = [r for r in residuals if 1e-12 < r < 1e-2]
    assert len(last) >= 2
    for before, after in pairwise(last):
        assert after < 10 * before**1.8


def test_units_that_do_not_look_at_each_other_lose_nothing_by_a_diagonal() -> None:
    net = zoo.network("elementwise", n=5)
    x, initial = zoo.data(net, 200, 2)
    expected = sweeps(net, x, initial, DEER())
    assert sweeps(net, x, initial, QuasiDEER()) == expected
    assert sweeps(net, x, initial, QuasiDEER(probes=1)) == expected, "a diagonal is estimated without an error"


def test_h_and_c_of_an_lstm_belong_together() -> None:
    net = zoo.network("lstm", "gate+4", n=6)
    x, initial = zoo.data(net, 200, 1)
    assert QuasiDEER().linearization(net.recurrence(x, initial).cell).elements == "block"
    assert sweeps(net, x, initial, QuasiDEER()) < 0.8 * sweeps(net, x, initial, QuasiDEER(structure="diagonal"))


def test_picard_knows_integrators_and_jacobi_does_not() -> None:
    xs = torch.randn(50, 2, 3, dtype=torch.float64)
    h0 = torch.zeros(2, 3, dtype=torch.float64)
    states, report = tl.unroll(lambda h, x: h + x, h0, xs, solver=Picard(tol=1e-13))
    torch.testing.assert_close(states, xs.cumsum(0))
    assert report.iterations == 2
    states, report = tl.unroll(lambda h, x: h + x, h0, xs, solver=Jacobi(tol=1e-13, max_iters=50))
    torch.testing.assert_close(states, xs.cumsum(0))
    assert report.iterations == 50


@pytest.mark.parametrize("solver", [DEER(), ELK()])
def test_a_linear_cell_needs_one_correction(solver: Solver) -> None:
    w = 0.5 * torch.randn(4, 4, dtype=torch.float64)
    xs = torch.randn(100, 2, 4, dtype=torch.float64)
    _, report = tl.unroll(lambda h, x: h @ w.t() + x, torch.zeros_like(xs[0]), xs, solver=replace(solver, tol=1e-12))
    assert report.iterations == 2


def test_elk_is_deer_where_newton_goes_straight() -> None:
    net = zoo.network("gru", n=6)
    x, initial = zoo.data(net, 100, 2)
    with torch.no_grad():
        deer, elk = (zoo.solve(net, x, initial, solver).report for solver in (DEER(), ELK()))
    assert deer.iterations == elk.iterations
    assert elk.residuals == pytest.approx(deer.residuals, rel=1e-6, abs=1e-14)


def test_elk_damps_a_sequence_that_newton_throws_off_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The box of a GRU hides how far Newton's method overshoots, so this cell has none."""
    w = 6 * torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    xs = torch.randn(200, 2, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    xs[:, 1] *= 50  # saturates: no derivative, no trouble
    strengths = []
    adapt = Damping.adapt

    def watch(self: Damping, error: Tensor, tolerance: float) -> None:
        adapt(self, error, tolerance)
        strengths.append(self.strength.clone())

    monkeypatch.setattr(Damping, "adapt", watch)
    solver = ELK(tol=1e-9, max_iters=200)
    states, report = tl.unroll(lambda h, x: torch.tanh(h @ w.t() + x), torch.zeros_like(xs[0]), xs, solver=solver)
    history = torch.stack(strengths)
    assert float(history[0].max()) == 0, "the first step is Newton's"
    assert float(history[:, 0].max()) > 0
    assert float(history[:, 1].max()) == 0
    assert report.converged
    expected, _ = tl.unroll(lambda h, x: torch.tanh(h @ w.t() + x), torch.zeros_like(xs[0]), xs, solver="sequential")
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", FAMILY)
def test_every_sweep_makes_one_more_state_exact(solver: str) -> None:
    """Also on a chaotic network: T sweeps are always enough, and no fallback is needed."""
    net = zoo.network("rnn tanh", "weights×8", n=6)
    x, initial = zoo.data(net, 40, 1)
    assert sweeps(net, x, initial, replace(FAMILY[solver], max_iters=40)) <= 40


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_gradients_of_quasi_methods_use_the_whole_jacobian() -> None:
    """With the diagonal in the backward pass, as quasi-DEER was published, they would be far off."""
    net = zoo.network("gru", "weights×2", n=6)
    x, initial = zoo.data(net, 60, 2)
    states, final = zoo.truth(net, x, initial)
    expected = zoo.gradients(net, x, initial, states, final, "outputs")
    for solver in (QuasiDEER(), QuasiELK(), QuasiDEER(probes=1)):
        solution = zoo.solve(net, x, initial, solver)
        given = zoo.gradients(net, x, initial, solution.outputs, solution.final, "outputs")
        for name in expected:
            assert zoo.difference(given[name], expected[name]) < 1e-11, name

    # the same adjoint recurrence over diagonals: λ[t] = g[t] + diag(J[t+1]) λ[t+1]
    problem = net.recurrence(x.detach(), initial.detach())
    cell = problem.cell
    assert isinstance(cell, GRUCell)
    with torch.no_grad():
        previous = torch.cat([initial.unsqueeze(0), states[:-1]]).detach()
        rows, inputs = previous.flatten(0, 1), problem.u.flatten(0, 1)
        grad = torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        diagonal = cell.diagonal(rows, inputs).view_as(states)
        jacobian = cell.jacobian(rows, inputs).reshape(*states.shape, -1)
        zero = torch.zeros_like
        approximate = linear_scan(torch.cat([diagonal[1:], zero(diagonal[:1])]), grad, reverse=True)
        exact = linear_scan(torch.cat([jacobian[1:], zero(jacobian[:1])]), grad, reverse=True, transpose=True)
        _, right = cell.vjp(rows, inputs, exact.flatten(0, 1))
        _, wrong = cell.vjp(rows, inputs, approximate.flatten(0, 1))
        by_weights = [cell.weight_grads([rows], gates)[0] for gates in (right, wrong)]
    assert zoo.difference(by_weights[0], expected["weight_hh_l0"]) < 1e-11
    assert zoo.difference(by_weights[1], expected["weight_hh_l0"]) > 0.2


@pytest.mark.parametrize("levels", [None, 1, 3, 30])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_adjoint_by_scan(name: str, levels: int | None) -> None:
    """Losses on every step and on the last, after any forward solver."""
    net = zoo.network(name)
    for steps, batch, loss in ((1, 2, "both"), (STEPS, BATCH, "both"), (37, 1, "last")):
        x, initial = zoo.data(net, steps, batch)
        solver = Shooting(chunk=5, adjoint="scan", adjoint_levels=levels)
        report = zoo.check_against_truth(net, x, initial, solver, 1e-12, loss).report
        assert report.backward is not None
        assert report.backward.solver == ("blelloch scan" if steps > 1 else "sequential")
        assert report.backward.iterations <= 3


@pytest.mark.parametrize("levels", [None, 2])
@pytest.mark.parametrize("regime", ["gate+6", "weights×4", "weights×8"])
def test_adjoint_by_scan_in_hard_regimes(regime: str, levels: int | None) -> None:
    for name in ("gru", "lstm"):
        net = zoo.network(name, regime)
        x, initial = zoo.data(net, 40, 2)
        solver = DEER(adjoint="scan", adjoint_levels=levels)
        zoo.check_against_truth(net, x, initial, solver, accuracy(regime))


def test_adjoint_by_scan_with_lengths_and_resets() -> None:
    for name in ("gru", "lstm", "function"):
        net = zoo.network(name)
        x, initial = zoo.data(net, STEPS, 5)
        lengths, resets = zoo.marks(STEPS)
        for levels in (None, 2):
            solver = Shooting(adjoint="scan", adjoint_levels=levels)
            zoo.check_against_truth(net, x, initial, solver, 1e-11, lengths=lengths, resets=resets)


def test_a_scan_of_no_levels_is_left_to_compiled_sweeps() -> None:
    net = zoo.network("gru", dtype=torch.float32)
    x, initial = zoo.data(net, 200, 2, dtype=torch.float32)
    for levels, expected in ((None, "sequential"), (0, "sequential"), (4, "blelloch scan")):
        solution = zoo.solve(net, x, initial, Shooting(adjoint="scan", adjoint_levels=levels))
        solution.outputs.sum().backward()
        if build.unavailable() is None:
            assert solution.report.backward.solver == expected
            assert "scan" in str(solution.report.backward)


def test_adjoint_levels_are_checked() -> None:
    with pytest.raises(ValueError, match="adjoint_levels goes with adjoint='scan'; adjoint is 'same'"):
        DEER(adjoint_levels=3)
    with pytest.raises(ValueError, match="adjoint_levels must be a whole number"):
        Shooting(adjoint="scan", adjoint_levels=-1)
