"""A user's cell by recorded sweeps: results and gradients against its plain loop in float64, and what a miss costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import replayed_on_cpu as emulated
import torch
from replayed_on_cpu import Chunks, Graph, Mending, StandIn
from torch import Tensor

import timeloom as tl
from timeloom import kernels
from timeloom.cells.fused import FusedCell
from timeloom.compile import remember
from timeloom.kernels import ReferenceSweeper
from timeloom.nn.steady_cells import KnownCalls
from timeloom.problem import Recurrence
from timeloom.solve import replayed

STEPS, BATCH, INPUTS, UNITS = 47, 2, 3, 4
CELLS: dict[str, Any] = {"LayerNormGRU": tl.cells.LayerNormGRU, "SLSTM": tl.cells.SLSTM}


class OwnStandIn(Mending):
    """The generated kernels' sweeper: what it records are the reference's sweeps."""

    recordable = True

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        return isinstance(problem.cell, FusedCell)

    def certifier(self, share_of_box: float, fading: bool) -> Callable[[Tensor, Tensor], Tensor | float] | None:
        return lambda starts, ends: StandIn.certify(self, starts, ends, share_of_box, fading=fading)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "KINDS", (OwnStandIn, ReferenceSweeper))
    monkeypatch.setattr(remember, "FEWEST_STEPS", 0)
    monkeypatch.setattr(KnownCalls, "settle", lambda *_, **__: None)  # these are of test_steady_cells.py
    Graph.replays = 0
    with emulated.on_a_cpu(monkeypatch):
        yield


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the driver had to do by itself."""
    seen: list[str] = []
    for name in ("solve_states", "solve_summed"):
        honest = getattr(replayed, name)

        def spy(*given: Any, name: str = name, honest: Any = honest) -> Any:
            seen.append(name)
            return honest(*given)

        monkeypatch.setattr(replayed, name, spy)
    return seen


def results(module: Any, x: Tensor, use_final: bool) -> list[Tensor]:
    module.zero_grad()
    x = x.detach().to(next(module.parameters()).dtype).requires_grad_()
    y, final = module(x)
    loss = (y * torch.linspace(0.2, 1.0, y.numel(), dtype=y.dtype).view_as(y)).sum()
    if use_final:
        loss = loss + (final[0] if isinstance(final, tuple) else final).square().sum()
    loss.backward()
    return [y.detach(), x.grad, *(weight.grad for weight in module.parameters())]  # type: ignore[list-item]


def pair(name: str) -> tuple[Any, Any]:
    ours = tl.Layer(CELLS[name](INPUTS, UNITS), solver=Chunks(tol=2e-5))
    exact = copy.deepcopy(ours).double()
    exact.solver = "sequential"
    return ours, exact


def assert_right(ours: Any, exact: Any, x: Tensor, use_final: bool = True) -> None:
    for own, truth in zip(results(ours, x, use_final), results(exact, x, use_final), strict=True):
        assert float((own.double() - truth).abs().max()) <= 5e-4 * max(1.0, float(truth.abs().max()))


@pytest.mark.parametrize("use_final", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_results_and_gradients_are_the_loops(name: str, use_final: bool, driven: list[str]) -> None:
    """Inputs and weights change from call to call."""
    ours, exact = pair(name)
    for _ in range(5):
        driven.clear()
        x = torch.randn(STEPS, BATCH, INPUTS)
        assert_right(ours, exact, x, use_final)
        with torch.no_grad():
            for own, right in zip(ours.parameters(), exact.parameters(), strict=True):
                own.add_(0.02 * torch.randn_like(own))
                right.copy_(own)
    assert driven == []
    assert Graph.replays >= 4
    assert ours.reports[0].certified
    assert ours.reports[0].backward.residuals[0] <= ours.reports[0].backward.tolerance
    assert "fused" in ours.reports[0].reason


def test_a_missed_certificate_goes_to_the_driver(driven: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, exact = pair("LayerNormGRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(4):
        assert_right(ours, exact, x)
    driven.clear()
    honest = replayed.report_of
    monkeypatch.setattr(replayed, "report_of", lambda error, *_: honest(torch.inf, *_))
    assert_right(ours, exact, x)
    assert driven == ["solve_states", "solve_summed"]


def test_marked_sequences_are_not_recorded() -> None:
    ours, exact = pair("LayerNormGRU")
    x, lengths = torch.randn(STEPS, BATCH, INPUTS), torch.tensor([STEPS, 20])
    for _ in range(4):
        with torch.no_grad():
            found, right = ours(x, lengths=lengths)[0], exact(x.double(), lengths=lengths)[0]
        assert float((found.double() - right).abs().max()) < 5e-4
    assert Graph.replays == 0


def test_gradients_of_gradients() -> None:
    ours, exact = pair("LayerNormGRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(4):
        results(ours, x, use_final=False)
    found = []
    for module in (ours, exact):
        given = x.to(next(module.parameters()).dtype).requires_grad_()
        (grad,) = torch.autograd.grad(module(given)[0].square().sum(), given, create_graph=True)
        module.zero_grad()
        grad.square().sum().backward()
        found.append([weight.grad for weight in module.parameters()])
    for own, right in zip(*found, strict=True):
        assert float((own.double() - right).abs().max()) <= 2e-3 * max(1.0, float(right.abs().max()))
