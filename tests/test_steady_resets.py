"""Sequences that begin anew inside, by the layers of a GPU and their replays, emulated on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import replayed_on_cpu
import torch
from replayed_on_cpu import Chunks, Graph
from torch import Tensor

import timeloom as tl
from timeloom.kernels.replay import CALLS_BEFORE

STEPS, BATCH, INPUTS, UNITS = 150, 3, 4, 5


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed_on_cpu.install(monkeypatch)


class ByHand(torch.nn.Module):
    """Torch's layer, step by step."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, hx: Any, resets: Tensor) -> tuple[Tensor, Any]:
        parts, outputs = hx if isinstance(hx, tuple) else (hx,), []
        state = parts
        for step, again in zip(x, resets, strict=True):
            state = tuple(torch.where(again[:, None], first, part) for first, part in zip(parts, state, strict=True))
            y, after = self.layer(step.unsqueeze(0), state if len(state) > 1 else state[0])
            state = after if isinstance(after, tuple) else (after,)
            outputs.append(y)
        return torch.cat(outputs), state


def found(module: torch.nn.Module, x: Tensor, hx: tuple[Tensor, ...], resets: Tensor) -> list[Tensor]:
    """Outputs, final state, and gradients by all that is live."""
    x = x.detach().requires_grad_()
    hx = tuple(part.detach().requires_grad_() for part in hx)
    y, final = module(x, hx if len(hx) > 1 else hx[0], resets=resets)
    final = final if isinstance(final, tuple) else (final,)
    loss = (y * torch.linspace(0.2, 1, y.numel()).view_as(y)).sum() + sum(part.square().sum() for part in final)
    return [y.detach(), *(part.detach() for part in final), *torch.autograd.grad(loss, [x, *hx, *module.parameters()])]


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize("bias", [True, False])
def test_resets_are_swept_and_replayed_by_whole_layers(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    ours = getattr(tl, kind)(INPUTS, UNITS, bias=bias, solver=Chunks(tol=2e-5))
    exact = ByHand(getattr(torch.nn, kind)(INPUTS, UNITS, bias=bias).double())
    exact.layer.load_state_dict(ours.state_dict())
    for call in range(CALLS_BEFORE + 6):
        x, before = torch.randn(STEPS, BATCH, INPUTS), Graph.replays
        hx = tuple(torch.randn(1, BATCH, UNITS) for _ in range(2 if kind == "LSTM" else 1))
        resets = torch.rand(STEPS, BATCH) < 0.03
        resets[call] = True
        truth = found(exact, x.double(), tuple(part.double() for part in hx), resets)
        for one, other in zip(found(ours, x, hx, resets), truth, strict=True):
            assert float((one - other).norm() / other.norm()) < 2e-5
        assert ours.reports[0].chunk < STEPS
        assert ours.reports[0].backward.chunk < STEPS
    assert Graph.replays >= before + 2, "both passes of the last call"
    assert len(ours._steady) == 1, "past the trunk"


@pytest.mark.parametrize("batch_first", [False, True])
def test_calls_with_and_without_resets_are_kept_apart(batch_first: bool) -> None:
    torch.manual_seed(0)
    ours = tl.GRU(INPUTS, UNITS, 2, batch_first=batch_first, solver=Chunks(tol=2e-5))
    plain = torch.nn.GRU(INPUTS, UNITS, 2, batch_first=batch_first).double()
    plain.load_state_dict(ours.state_dict())
    shape = (BATCH, STEPS) if batch_first else (STEPS, BATCH)
    for _ in range(CALLS_BEFORE + 4):
        x, resets = torch.randn(*shape, INPUTS), torch.rand(shape) < 0.05
        whole = ours(x)[0]
        torch.testing.assert_close(whole.double(), plain(x.double())[0], rtol=1e-4, atol=1e-5)
        marked = ours(x, resets=resets)[0]
        other = ours(x, resets=torch.zeros_like(resets))[0]
        torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-5)
        assert float((marked - whole).detach().abs().max()) > 0.01
        before, resets[:] = marked.detach().clone(), ~resets  # users may write into theirs
        wanted = torch.autograd.grad(marked.square().sum(), ours.weight_hh_l0)[0]
        again = ours(x, resets=~resets)[0]
        torch.testing.assert_close(again.detach(), before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            torch.autograd.grad(again.square().sum(), ours.weight_hh_l0)[0], wanted, rtol=1e-4, atol=1e-4
        )
    assert len(ours._steady) == 2


def test_backward_passes_may_come_in_any_order_and_twice_differentiable() -> None:
    torch.manual_seed(0)
    ours = tl.GRU(INPUTS, UNITS, solver=Chunks(tol=2e-5))
    inputs = [(torch.randn(STEPS, BATCH, INPUTS), torch.rand(STEPS, BATCH) < 0.05) for _ in range(3)]
    for x, resets in inputs * 3:
        ours(x, resets=resets)[0].square().sum().backward()
    assert len(ours._steady) == 1

    def gradient(x: Tensor, resets: Tensor) -> Tensor:
        return torch.autograd.grad(ours(x, resets=resets)[0].square().sum(), ours.weight_hh_l0)[0]

    alone = [gradient(*given) for given in inputs]
    losses = [ours(x, resets=resets)[0].square().sum() for x, resets in inputs]
    for loss, wanted in zip(losses, alone, strict=True):
        torch.testing.assert_close(torch.autograd.grad(loss, ours.weight_hh_l0)[0], wanted, rtol=1e-4, atol=1e-4)
    x, resets = inputs[0]
    loss = ours(x, resets=resets)[0].square().sum()
    (first,) = torch.autograd.grad(loss, ours.weight_hh_l0, create_graph=True)
    torch.testing.assert_close(first.detach(), alone[0], rtol=1e-4, atol=1e-4)
    assert torch.isfinite(torch.autograd.grad(first.square().sum(), ours.weight_hh_l0)[0]).all()


def test_a_reset_of_every_step_leaves_nothing_to_remember() -> None:
    ours = tl.GRU(INPUTS, UNITS, solver=Chunks(tol=2e-5))
    x, hx = torch.randn(STEPS, BATCH, INPUTS), torch.randn(1, BATCH, UNITS)
    y, _ = ours(x, hx, resets=torch.ones(STEPS, BATCH, dtype=torch.bool))
    alone, _ = ours(x[70:71], hx)
    torch.testing.assert_close(y[70:71], alone, rtol=1e-5, atol=1e-6)
