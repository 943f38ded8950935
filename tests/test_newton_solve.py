"""The loop around fused Newton steps, on a CPU: when it looks, when it stops, what it reports, and what comes after."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.auto.sweep_counts import FEW_SWEEPS, LOOK_AFTER, SweepCounts
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.kernels.faults import KernelFault
from timeloom.kernels.layer import Cutting, Found, Gradients
from timeloom.kernels.newton import newton_steps
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence, cut_evenly
from timeloom.solve import newton, trunk
from timeloom.solve.newton import FIRST_STEPS, MOST_SWEEPS
from timeloom.solve.newton_reference import NewtonReference
from timeloom.solve.residual import certificate, relative, scales
from timeloom.solvers import DEER

pytestmark = pytest.mark.usefixtures("one_thread")


class FusedLayer(CPULayer):
    """A layer of the CPU's kernels with the twin in place of fused ones, which are there on a GPU alone."""

    fails: ClassVar[bool] = False
    errors: ClassVar[float | None] = None
    looks: ClassVar[list[int]] = []

    @property
    def has_newton(self) -> bool:
        return True

    def forward(
        self, cutting: Cutting, share_of_box: float, keep: bool, found: Found | None = None
    ) -> tuple[list[Tensor], Tensor | float]:
        if cutting.newton is None:
            return super().forward(cutting, share_of_box, keep, found)
        self._count(cutting.newton)
        return newton_steps(NewtonReference(self._problem()), cutting.newton, self.initial)

    def backward(
        self, cutting: Cutting, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
    ) -> tuple[Gradients, Tensor | float]:
        in_order = cutting.newton is None  # what the CPU's kernels read of a forward pass is not kept
        if cutting.newton is not None:
            self._count(cutting.newton)
        problem, states, incoming = self._problem(), kept[: len(self.parts)], grads[0]
        final = torch.zeros_like(self.initial) if grads[1] is None else grads[1]
        twin = NewtonReference(problem, cutting.chunk if in_order else 8)
        gates = self.x.new_zeros(*self.x.shape[:2], self.cell.gate_width)
        maps = twin.compose_adjoint(states, incoming)
        ends, segments = twin.chain(maps, final), cut_evenly(len(self.x), len(final), twin.chunk, True)
        for _ in range(cutting.newton or 1):
            data = AdjointData(states, incoming, gates)
            begins, _ = ReferenceSweeper(problem).adjoint(segments, ends.flatten(0, 1), data)
            arriving = torch.cat([ends[:1], begins.view_as(ends)[:-1]])
            jump, ends = arriving - ends, twin.correct(maps, ends, begins.view_as(ends))
        scale = scales(ends, arriving, self.parts, torch.full((1, len(self.parts)), 1e-30), True, joint=True)
        w_hh, b_hn = self.cell.weight_grads([part[:-1].flatten(0, 1) for part in states], gates.flatten(0, 1))
        d_u = self.cell.input_grads(gates).flatten(0, 1)
        total = d_u.sum(0)
        gradients: Gradients = (
            (d_u @ self.w_ih).view_as(self.x) if want_x else None, begins[-len(final):], d_u.t() @ self.x.flatten(0, 1),
            w_hh, total, torch.cat([total[: 2 * self.n], b_hn]),
        )  # fmt: skip
        error = certificate(relative(jump, scale, self.parts))
        return gradients, error if self.errors is None or in_order else self.errors

    def _count(self, steps: int) -> None:
        self.looks.append(steps)
        if self.fails:
            raise KernelFault("told before")

    def _problem(self) -> Recurrence:
        bias = self.bias()
        u = self.x @ self.w_ih.t() + (0 if bias is None else bias)
        return Recurrence(self.cell, u, self.initial)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> type[FusedLayer]:
    monkeypatch.setattr(trunk, "layer_kind", lambda cell, x: FusedLayer)
    for name, value in (("fails", False), ("errors", None), ("looks", [])):
        monkeypatch.setattr(FusedLayer, name, value)
    return FusedLayer


def test_the_next_solve_makes_as_many_steps_as_the_last_one_took(fused: type[FusedLayer]) -> None:
    torch.manual_seed(0)
    layer = tl.GRU(3, 5, solver=DEER())
    with torch.no_grad():
        layer.weight_hh_l0 *= 4
    x = torch.randn(80, 2, 3)
    for _ in range(2):
        with torch.no_grad():
            layer(x)
    report = layer.reports[0]
    first, *others, last = fused.looks
    assert first == FIRST_STEPS
    assert others[:1] == [2 * FIRST_STEPS]
    assert last == report.iterations - 1 < others[-1]
    assert (report.solver, report.chunk, report.fell_back, report.converged) == ("deer", 1, False, True)
    assert report.residuals[-1] <= report.tolerance
    assert report.iterations == len(report.residuals)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_few_steps_allowed_are_what_is_taken(fused: type[FusedLayer], most: int) -> None:
    layer = tl.GRU(3, 5, solver=DEER(max_iters=most, on_divergence="ignore"))
    with torch.no_grad():
        layer.weight_hh_l0 *= 3
        layer(torch.randn(60, 2, 3))
    report = layer.reports[0]
    assert not report.converged
    assert len(report.residuals) == most
    assert f"max_iters={most}" in report.reason
    assert fused.looks == [most - 1]


def test_what_is_not_finite_is_given_up_at_once(fused: type[FusedLayer]) -> None:
    layer, x = tl.GRU(3, 5, solver=DEER()), torch.randn(30, 1, 3)
    x[3] = torch.nan
    with torch.no_grad():
        y = layer(x)[0]
    assert "not finite" in layer.reports[0].reason
    assert fused.looks == [FIRST_STEPS]
    assert y[:3].isfinite().all()
    assert y[3:].isnan().all()


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


@pytest.mark.parametrize("in_order", [True, False])
def test_a_gradient_that_is_not_certified_is_solved_for_again(
    in_order: bool, fused: type[FusedLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where trained weights amplify the rounding of a scan: in order at last, or by single steps if it is long."""
    monkeypatch.setattr(newton, "IN_ORDER_UP_TO", 30 if in_order else 29)
    torch.manual_seed(0)
    layer, truth, x = tl.GRU(3, 5, solver=DEER()), nn.GRU(3, 5).double(), torch.randn(30, 2, 3)
    truth.load_state_dict(layer.state_dict())
    truth(x.double())[0].sum().backward()
    fused.errors = 1.0
    for sweeps in ([2, 4, 8], [8]):
        layer.zero_grad()
        y = layer(x)[0]
        fused.looks.clear()
        y.sum().backward()
        assert fused.looks == sweeps  # the second call knows that few are not enough
        report = layer.reports[0].backward
        assert report is not None
        assert layer.reports[0].certified
        assert ("8 sweeps left the rounding of the scan" in report.reason) == report.fell_back == in_order
        for mine, theirs in zip(layer.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)
    fused.errors = None
    layer(x)[0].sum().backward()
    assert layer.reports[0].backward.iterations == MOST_SWEEPS


def test_few_sweeps_are_tried_again_now_and_then() -> None:
    counts = SweepCounts()
    for _ in range(LOOK_AFTER - 1):
        counts.note_scan(8)
        assert counts.scan_sweeps == 8
    counts.note_scan(8)
    assert counts.scan_sweeps == FEW_SWEEPS


def test_rounded_jacobians_are_not_the_kernels(fused: type[FusedLayer]) -> None:
    layer = tl.GRU(3, 5, solver=DEER(precision="bfloat16"))
    with torch.no_grad():
        layer(torch.randn(30, 2, 3))
    assert "on the chip" not in layer.reports[0].reason
