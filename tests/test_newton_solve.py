"""The loop around fused Newton steps, on a CPU: when it looks, when it stops, what it reports, and what comes after."""

from __future__ import annotations

import pytest
import torch
from test_newton_kernels import in_double, problem_of, run_in_order
from torch import Tensor, nn

import timeloom as tl
from timeloom.auto.experience import Experience
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.kernels.faults import KernelFault
from timeloom.kernels.layer import Gradients
from timeloom.kernels.newton import NewtonSteps, States
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence, cut_evenly
from timeloom.solve import trunk
from timeloom.solve.newton import FIRST_STEPS, MORE_STEPS, newton_states
from timeloom.solve.newton_reference import NewtonReference
from timeloom.solve.plan import Plan
from timeloom.solve.residual import certificate, relative, scales
from timeloom.solvers import DEER

pytestmark = pytest.mark.usefixtures("one_thread")


def plan_of(problem: Recurrence, **options: object) -> Plan:
    return DEER(**options).plan(problem, Experience())  # type: ignore[arg-type]


class Counted(NewtonReference):
    """The twin, which counts its looks."""

    finished = 0

    def finish(self, states: States | None, residual: Tensor) -> States:
        self.finished += 1
        return super().finish(states, residual)


def test_states_are_certified_and_the_next_solve_looks_once() -> None:
    problem, experience, looks = in_double(problem_of("gru", 6, 60, 2, scale=4.0)), Experience(), []
    for _ in range(2):
        kernels = Counted(problem)
        states, report, met = newton_states(kernels, plan_of(problem), experience, problem.initial)
        assert met
        assert report.converged
        assert (report.solver, report.chunk, report.fell_back) == ("deer", 1, False)
        assert report.residuals[-1] <= report.tolerance
        assert report.iterations == len(report.residuals)
        looks.append(kernels.finished)
        torch.testing.assert_close(states[0], run_in_order(problem)[0], rtol=1e-12, atol=1e-13)
    assert looks[0] > 1
    assert looks[1] == 1
    assert experience.newton_steps == report.iterations - 1


def test_few_steps_allowed_are_what_is_taken() -> None:
    problem = in_double(problem_of("gru", 6, 60, 2, scale=3.0))
    for most in (1, 2, 4):
        states, report, met = newton_states(
            NewtonReference(problem), plan_of(problem, max_iters=most), Experience(), problem.initial
        )
        assert not met
        assert not report.converged
        assert len(report.residuals) == most
        assert f"max_iters={most}" in report.reason
        assert len(states[0]) == 61


def test_what_is_not_finite_is_given_up_at_once() -> None:
    problem = problem_of("gru", 4, 30, 1)
    problem.u[3] = torch.nan
    _, report, met = newton_states(NewtonReference(problem), plan_of(problem), Experience(), problem.initial)
    assert not met
    assert report.iterations <= FIRST_STEPS + MORE_STEPS + 1
    assert "not finite" in report.reason


class FusedLayer(CPULayer):
    """A layer of the CPU's kernels with the twin in place of fused ones, which are there on a GPU alone."""

    fails = False

    def newton(self, share_of_box: float, keep: bool) -> tuple[NewtonSteps, list[Tensor]] | None:
        if self.fails:
            raise KernelFault("told before")
        return NewtonReference(self._problem()), []

    def backward_by_scan(self, kept, grads, want_x, enough):  # type: ignore[no-untyped-def]
        if self.fails:
            raise KernelFault("told before")
        problem, parts = self._problem(), len(self.parts)
        states, (incoming, final) = kept[:parts], grads
        final = torch.zeros_like(self.initial) if final is None else final
        twin, sweeper = NewtonReference(problem), ReferenceSweeper(problem)
        maps = twin.compose_adjoint(states, incoming)
        ends, gates = twin.chain(maps, final), self.x.new_zeros(*self.x.shape[:2], self.cell.gate_width)
        segments = cut_evenly(len(self.x), len(final), twin.chunk, True)
        begins, _ = sweeper.adjoint(segments, ends.flatten(0, 1), AdjointData(states, incoming, gates))
        arriving = torch.cat([ends[:1], begins.view_as(ends)[:-1]])
        scale = scales(ends, arriving, self.parts, torch.full((1, parts), 1e-30, dtype=ends.dtype), True, joint=True)
        error = certificate(relative(arriving - ends, scale, self.parts))
        enough(error)
        w_hh, b_hn = self.cell.weight_grads([part[:-1].flatten(0, 1) for part in states], gates.flatten(0, 1))
        d_u = self.cell.input_grads(gates).flatten(0, 1)
        total = d_u.sum(0)
        gradients: Gradients = (
            (d_u @ self.w_ih).view_as(self.x) if want_x else None, begins[-len(final):], d_u.t() @ self.x.flatten(0, 1),
            w_hh, total, torch.cat([total[: 2 * self.n], b_hn]),
        )  # fmt: skip
        return gradients, [error]

    def _problem(self) -> Recurrence:
        bias = self.bias()
        u = self.x @ self.w_ih.t() + (0 if bias is None else bias)
        return Recurrence(self.cell, u, self.initial)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> type[FusedLayer]:
    monkeypatch.setattr(trunk, "layer_kind", lambda cell, x: FusedLayer)
    monkeypatch.setattr(FusedLayer, "fails", False)
    return FusedLayer


@pytest.mark.parametrize("fails", [False, True])
def test_layers_take_the_kernels_where_they_run(fused: type[FusedLayer], fails: bool) -> None:
    fused.fails = fails
    torch.manual_seed(0)
    truth, layer = nn.GRU(3, 5).double(), tl.GRU(3, 5, solver=DEER())
    layer.load_state_dict(truth.state_dict())
    x = torch.randn(80, 2, 3)
    inputs = [x.double().requires_grad_(), x.clone().requires_grad_()]
    for net, given in zip((truth, layer), inputs, strict=True):
        y, last = net(given)
        (y.square().sum() + last.sum()).backward()
    report = layer.reports[0]
    assert report.certified
    assert ("on the chip" in report.reason) == (not fails)
    assert report.backward is not None
    assert report.backward.solver == "linear scan"
    assert ("on the chip" in report.backward.reason) == (not fails)
    for mine, theirs in zip([*layer.parameters(), inputs[1]], [*truth.parameters(), inputs[0]], strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("on_divergence", "exact"), [("sequential", True), ("ignore", False)])
def test_what_does_not_converge_ends_as_was_asked_for(fused: type[FusedLayer], on_divergence: str, exact: bool) -> None:
    torch.manual_seed(0)
    layer = tl.GRU(3, 5, solver=DEER(max_iters=2, on_divergence=on_divergence))
    plain = nn.GRU(3, 5)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(80, 2, 3)
    with torch.no_grad():
        y, truth = layer(x)[0], plain(x)[0]
    report = layer.reports[0]
    assert (report.fell_back, report.converged) == (exact, exact)
    assert "gave up" in report.reason
    assert torch.allclose(y, truth, rtol=0, atol=1e-6) == exact


def test_raise_is_heeded(fused: type[FusedLayer]) -> None:
    layer = tl.GRU(3, 5, solver=DEER(max_iters=2, on_divergence="raise"))
    with pytest.raises(tl.ConvergenceError, match="deer solver did not converge"):
        layer(torch.randn(80, 2, 3))


def test_a_gradient_that_is_not_certified_is_solved_for_again(
    fused: type[FusedLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FusedLayer.backward_by_scan
    monkeypatch.setattr(FusedLayer, "backward_by_scan", lambda self, *given: (honest(self, *given)[0], [1.0]))
    layer = tl.GRU(3, 5, solver=DEER())
    layer(torch.randn(30, 2, 3))[0].sum().backward()
    assert layer.reports[0].backward is not None
    assert "on the chip" not in layer.reports[0].backward.reason
    assert layer.reports[0].certified


def test_rounded_jacobians_are_not_the_kernels(fused: type[FusedLayer]) -> None:
    layer = tl.GRU(3, 5, solver=DEER(precision="bfloat16"))
    with torch.no_grad():
        layer(torch.randn(30, 2, 3))
    assert "on the chip" not in layer.reports[0].reason
