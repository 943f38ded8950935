"""Warm starts in layers that enter chunks from known states, as the CUDA kernels do, but by plain torch sweeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.kernels.cuda.layer import CUDALayer
from timeloom.kernels.layer import Cutting
from timeloom.kernels.reference import ReferenceSweeper
from timeloom.problem import Recurrence
from timeloom.solve import trunk
from timeloom.solve.recurrence import BEGUN


class PlainSweeper(ReferenceSweeper):
    """The reference, with the certificate of one sweep."""

    def certify(self, starts: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
        batch = self.problem.batch
        return (starts[batch:] - ends[:-batch]).abs().max()


class PlainLayer(CUDALayer):
    """The CUDA kernels' layer whose forward sweeps run in plain torch."""

    def sweeper(self, problem: Recurrence, keep: bool, tape: list[Tensor] | None = None) -> Any:
        return PlainSweeper(problem), []

    def recordable(self, cutting: Cutting) -> bool:
        return False


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk, "layer_kind", lambda cell, x: PlainLayer)


@pytest.mark.parametrize(("kind", "batch"), [("GRU", 1), ("LSTM", 2), ("RNN", 1)])
def test_layers_begin_at_known_states_and_learn_a_shorter_warmup(kind: str, batch: int, plainly: None) -> None:
    torch.manual_seed(0)
    layer, x = getattr(tl, kind)(2, 5), torch.randn(3001, batch, 2)
    warm, cold, seen = tl.WarmStarts(always=True), 0, []
    with torch.no_grad():
        for epoch in range(8):
            with warm.batch(range(batch)):
                y, _ = layer(x)
            report = layer.reports[0]
            seen.append(BEGUN in report.reason)
            cold = report.warmup if epoch == 0 else cold
            exact = getattr(nn, kind)(2, 5).double()
            exact.load_state_dict(layer.state_dict())
            torch.testing.assert_close(y, exact(x.double())[0].float(), rtol=1e-4, atol=1e-5)
            for parameter in layer.parameters():
                parameter += 1e-5 * torch.randn_like(parameter)
    assert report.converged
    assert report.chunk < 3001
    assert seen == [False] + [True] * 7
    assert 0 < report.warmup < cold


@pytest.mark.parametrize(("chunk", "warmup"), [(128, 0), (100, 1)])
def test_a_fixed_solver_takes_known_states_for_its_warmup(chunk: int, warmup: int, plainly: None) -> None:
    torch.manual_seed(0)
    layer = tl.GRU(2, 5, solver=tl.solvers.Shooting(chunk=chunk, warmup=40))
    x, warm = torch.randn(1001, 2, 2), tl.WarmStarts()
    with torch.no_grad():
        for _ in range(2):
            with warm.batch([0, 1]):
                y, _ = layer(x)
    assert (layer.reports[0].warmup, layer.reports[0].iterations) == (warmup, 1)
    assert BEGUN in layer.reports[0].reason
    torch.testing.assert_close(y, nn.GRU.forward(layer, x)[0], rtol=1e-4, atol=1e-5)
