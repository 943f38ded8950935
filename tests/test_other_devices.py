"""Devices that timeloom has no sweeps on, such as `mps` and `xpu`: the CPU stands in for one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import timeloom as tl
from timeloom.nn import torch_layer

STEPS = 300
KINDS = ("GRU", "LSTM", "RNN")


@pytest.fixture(autouse=True)
def no_sweeps_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_layer, "SWEPT", ("cuda",))
    torch_layer._tell_once.cache_clear()


def pair(kind: str, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    theirs = getattr(nn, kind)(3, 5, **options)
    ours = getattr(tl, kind)(3, 5, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(layer: nn.Module, x: Any) -> list[Tensor]:
    layer.zero_grad()
    y = layer(x)[0]
    y = y.data if not isinstance(y, Tensor) else y
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]


@pytest.mark.filterwarnings("ignore:timeloom has no sweeps")
@pytest.mark.parametrize("solver", ["auto", "deer"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_layer_runs_and_the_report_says_so(kind: str, solver: str) -> None:
    theirs, ours = pair(kind, num_layers=2, bidirectional=True)
    ours.solver = solver
    x = torch.randn(STEPS, 2, 3)
    for given in (x, pack_sequence([x[:, 0], x[:9, 1]])):
        for one, other in zip(run(ours, given), run(theirs, given), strict=True):
            assert torch.equal(one, other)
        assert all("no sweeps on cpu" in report.reason for report in ours.reports)


def test_it_is_told_once() -> None:
    _, ours = pair("GRU")
    x = torch.randn(STEPS, 2, 3)
    with pytest.warns(UserWarning, match="timeloom has no sweeps on cpu: torch's own layers run there"):
        ours(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(x)
        pair("LSTM")[1](x)


@pytest.mark.filterwarnings("ignore:timeloom has no sweeps")
@pytest.mark.parametrize("kind", KINDS)
def test_what_torchs_layer_has_not_runs_step_by_step(kind: str) -> None:
    theirs, ours = pair(kind)
    x = torch.randn(40, 2, 3)
    resets = torch.zeros(40, 2, dtype=torch.bool)
    resets[17] = True
    y, _, states = ours(x, resets=resets, return_states=True)
    expected = torch.cat([theirs(x[:17])[0], theirs(x[17:])[0]])
    assert torch.allclose(y, expected, atol=1e-6)
    h = states[0] if isinstance(states, tuple) else states
    assert torch.allclose(h[0], expected, atol=1e-6)
    ragged = ours(x, lengths=torch.tensor([40, 11]))[0]
    assert torch.allclose(ragged[:11], theirs(x)[0][:11], atol=1e-6)
    assert not ragged[11:, 1].any()
    dropping = getattr(tl, kind)(3, 5, recurrent_dropout=0.5, zoneout=0.2)
    dropping(x)[0].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in dropping.parameters())


@pytest.mark.filterwarnings("ignore:timeloom has no sweeps")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_sweeps_would_find(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions of two layers, with lengths and resets, and all gradients."""
    _, ours = pair(kind, num_layers=2, bidirectional=True)
    ours.double()
    x, resets = torch.randn(30, 3, 3, dtype=torch.float64), torch.rand(30, 3) < 0.1
    found = []
    for swept in (("cuda",), ("cpu", "cuda")):
        monkeypatch.setattr(torch_layer, "SWEPT", swept)
        ours.zero_grad()
        leaf = x.clone().requires_grad_()
        y, final, states = ours(leaf, lengths=torch.tensor([30, 1, 17]), resets=resets, return_states=True)
        parts = [*final, *states] if isinstance(final, tuple) else [final, states]
        sum(part.square().sum() for part in (y, *parts)).backward()  # type: ignore[union-attr]
        found.append([y, *parts, leaf.grad, *(parameter.grad for parameter in ours.parameters())])
    for stepped, sweeping in zip(*found, strict=True):
        torch.testing.assert_close(stepped, sweeping, rtol=1e-10, atol=1e-12)
