"""Calls that are replays alone, of Newton's steps: results against torch in float64, and when more steps are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import replayed_on_cpu as emulated
import torch
from replayed_on_cpu import Graph
from test_steady import BATCH, INPUTS, STEPS, UNITS, assert_right, move, trunk_calls
from torch import Tensor, nn

import timeloom as tl
from timeloom.auto.sweep_counts import FEW_SWEEPS
from timeloom.kernels.cuda import layer as cuda_layer
from timeloom.kernels.newton import Maps, States
from timeloom.kernels.recording import Recording
from timeloom.problem import Recurrence
from timeloom.solve.newton_reference import NewtonReference
from timeloom.solvers import DEER

__all__ = ["trunk_calls"]
CALLS_BEFORE = 7
KINDS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}


class StandInNewton(NewtonReference):
    """The kernels' steps by their twin; what is saved for the backward pass is the inputs (see `replayed_on_cpu`)."""

    def __init__(self, problem: Recurrence, share_of_box: float, saved: Tensor | None = None) -> None:
        super().__init__(problem)
        self._saved = saved

    def finish(self, states: States | None, residual: Tensor) -> States:
        if self._saved is not None:
            self._saved.copy_(self.problem.u)
        return super().finish(states, residual)

    def correct(self, maps: Maps, starts: Tensor, ends: Tensor) -> Tensor:
        return super().correct(maps, starts, ends.view_as(starts))


WAITING, MENDED = "waiting", "mended"
"""For certificates; or not, since graphs mend what is not certified."""
waiting_alone = pytest.mark.parametrize("_on_a_cpu", [WAITING], indirect=True)


@pytest.fixture(autouse=True, params=[WAITING, MENDED])
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(cuda_layer, "CUDANewton", StandInNewton)
    monkeypatch.setattr(cuda_layer, "newton_fits", lambda *_: True)
    with emulated.on_a_cpu(monkeypatch, request.param == MENDED):
        yield


def pair(kind: str, solver: Any, **options: Any) -> tuple[Any, Any]:
    ours = getattr(tl, kind)(INPUTS, UNITS, solver=solver, **options)
    exact = KINDS[kind](INPUTS, UNITS, **options).double()
    exact.load_state_dict(ours.state_dict())
    return ours, exact


@pytest.mark.parametrize("final", [False, True], ids=["outputs", "outputs and final state"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one layer", "four"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_torchs(
    kind: str, options: dict[str, Any], final: bool, trunk_calls: list[str]
) -> None:
    ours, exact = pair(kind, DEER(tol=2e-5), **options)
    for call in range(CALLS_BEFORE + 3):
        if call == CALLS_BEFORE:
            trunk_calls.clear()
        before = Graph.replays
        assert_right(ours, exact, torch.randn(STEPS, BATCH, INPUTS).requires_grad_(final), use_final=final)
        move(ours, exact, by=1e-3)
    assert trunk_calls == []
    assert Graph.replays - before == 2 * ours._stacked
    for report in ours.reports:
        assert report.solver == "deer"
        assert report.residuals[-1] <= report.tolerance
        assert len(report.residuals) == report.iterations
        assert report.backward.iterations == FEW_SWEEPS
        assert "on the chip" in report.reason


def needing_more(scale: float) -> tuple[Any, Any, Tensor, int]:
    """A settled network, its recurrent weights so much larger now; exactly so; an input; the steps it took before."""
    ours, exact = pair("GRU", DEER(tol=2e-5))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, x)
    taken = ours.reports[0].iterations
    with torch.no_grad():
        for module in (ours, exact):
            module.weight_hh_l0.mul_(scale)
    return ours, exact, x, taken


@waiting_alone
def test_weights_that_need_more_steps_get_them(trunk_calls: list[str]) -> None:
    ours, exact, x, taken = needing_more(4)
    trunk_calls.clear()
    assert_right(ours, exact, x)
    assert trunk_calls[0] == "forward"
    assert ours.reports[0].iterations > taken
    for _ in range(CALLS_BEFORE):
        trunk_calls.clear()
        assert_right(ours, exact, x)
    assert trunk_calls == []


@pytest.mark.parametrize("_on_a_cpu", [MENDED], indirect=True)
def test_weights_that_need_more_steps_are_mended_and_get_them(trunk_calls: list[str]) -> None:
    ours, exact, x, taken = needing_more(4)
    trunk_calls.clear()
    assert_right(ours, exact, x)
    assert trunk_calls == []
    assert ours.reports[0].fell_back
    assert "Newton's steps were not enough" in ours.reports[0].reason
    for _ in range(CALLS_BEFORE):
        trunk_calls.clear()
        assert_right(ours, exact, x)
    assert trunk_calls == []
    assert ours.reports[0].iterations > taken
    assert not ours.reports[0].fell_back


@waiting_alone
def test_gradients_that_are_not_certified_are_solved_for_anew(
    trunk_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, exact = pair("GRU", DEER(tol=2e-5))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, x)
    honest = Recording.read_all

    def missed(self: Recording, turn: int) -> list[float] | None:
        return [1.0] if self.ground is not None else honest(self, turn)

    monkeypatch.setattr(Recording, "read_all", missed)
    trunk_calls.clear()
    assert_right(ours, exact, x)
    assert trunk_calls == ["backward"]


def test_a_network_that_diverges_is_not_given_more_steps_for_ever() -> None:
    ours, _, x, _ = needing_more(60)
    for _ in range(2 * CALLS_BEFORE):
        ours(x)[0].sum().backward()
    (experience,) = ours.experiences()
    assert experience.forward.counts.newton_steps < 40
