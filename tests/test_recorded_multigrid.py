"""Coarse levels by recorded graphs, simulated on a CPU: the numbers without them, from other tensors in every call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import replayed_on_cpu as emulated
import torch
from replayed_on_cpu import Graph
from torch import Tensor

import timeloom as tl
from timeloom.kernels import replay
from timeloom.mgrit import recorded
from timeloom.solvers import MGRIT
from timeloom.torch_state import streams

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH, INPUTS, UNITS = 70, 2, 3, 5
SOLVERS: dict[str, MGRIT] = {
    "as published": MGRIT.paper(),
    "exact": MGRIT(coarsening=(4, 3, 3), guess="initial"),
    "F-cycles": MGRIT(coarsening=2, levels=4, cycle="F", guess="nested"),
}
LAYERS: dict[str, Any] = {"ImplicitGRU": tl.ImplicitGRU, "GRU": tl.GRU, "LSTM": tl.LSTM, "RNN": tl.RNN}


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, where every operation is a launch."""
    monkeypatch.setattr(recorded, "is_launched", lambda u: True)
    monkeypatch.setattr(replay, "record", emulated.record)
    monkeypatch.setattr(replay, "_memory", lambda _: 2**40)
    monkeypatch.setattr(streams, "may_replay", lambda _: True)
    monkeypatch.setattr(streams, "stream_of", lambda _: 0)
    replay.RECORDINGS.clear()
    Graph.replays = 0
    yield
    replay.RECORDINGS.clear()


def step(layer: Any, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)[0]
    (y[-1].square().sum() + 0.1 * y.sum()).backward()
    return [y.detach(), x.grad, *(weight.grad for weight in layer.parameters())]  # type: ignore[list-item]


def remembering(name: str, solver: MGRIT) -> Any:
    """A layer whose jumps need the coarse levels."""
    torch.manual_seed(0)
    coarse = solver.coarse if name.endswith("GRU") else "frozen"
    layer = LAYERS[name](INPUTS, UNITS, solver=replace(solver, coarse=coarse))
    with torch.no_grad():
        layer.bias_ih_l0[UNITS : 2 * UNITS] += 3.0
    return layer


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_and_reports_are_those_without(
    name: str, solver: MGRIT, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = remembering(name, solver)
    plain = copy.deepcopy(ours)
    for number in range(5):
        x = torch.randn(STEPS, BATCH, INPUTS, generator=torch.Generator().manual_seed(number))
        found = step(ours, x)
        with monkeypatch.context() as as_on_a_cpu:
            as_on_a_cpu.setattr(recorded, "is_launched", lambda u: False)
            expected = step(plain, x)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
        for report, other in zip(ours.reports, plain.reports, strict=True):
            for one, two in ((report, other), (report.backward, other.backward)):
                assert (one.solver, one.iterations, one.reason) == (two.solver, two.iterations, two.reason)
                for left, wanted in zip(one.levels, two.levels, strict=True):
                    assert left == pytest.approx(wanted, rel=1e-3, abs=1e-6)
        with torch.no_grad():
            for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
                own += 0.05 * torch.randn_like(own)
                other.copy_(own)
    assert Graph.replays > 2 or ours.reports[0].iterations == 1  # nothing but relaxation was needed
    if solver.skip_down:
        assert Graph.replays >= 6


def test_what_is_not_made_of_tensors_alone_is_not_recorded(recording: None) -> None:
    layer = remembering("GRU", MGRIT(coarsening=4, guess="initial"))
    x, own = torch.randn(STEPS, BATCH, INPUTS), torch.nn.GRUCell(INPUTS, UNITS)
    for _ in range(4):
        layer(x, lengths=torch.tensor([STEPS, 31]))
        layer(x, resets=(torch.arange(STEPS) == 20)[:, None].expand(-1, BATCH))
        tl.unroll(lambda h, x: own(x, h), torch.zeros(BATCH, UNITS), x, solver=MGRIT(coarsening=4))
    layer.solver = MGRIT(coarsening=4, guess="initial", coarse=lambda h, x, span: h)
    for _ in range(4):
        layer(x)
    assert Graph.replays == 0
