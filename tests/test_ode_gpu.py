"""`odeint` on a GPU gives what it gives on a CPU: points, gradients, guesses. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from experiments.deer_two_body.hamiltonian import Hamiltonian, attraction, orbits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def solve(device: str, step: str, guess: Tensor | None = None) -> list[Tensor]:
    """Points of a small neural ODE, and all gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(device)
    y0 = torch.tensor([[0.3, -0.5, 0.8], [1.0, 0.1, 0.2]], dtype=torch.float64, device=device, requires_grad=True)
    t = torch.linspace(0, 2, 301, dtype=torch.float64, device=device)
    y = tl.odeint(lambda _, y: net(y), y0, t, step=step, guess=guess)
    grads = torch.autograd.grad(y.square().mean(), [y0, *net.parameters()])
    return [tensor.detach().cpu() for tensor in (y, *grads)]


@pytest.mark.parametrize("step", ["rk4", "implicit-midpoint", "hermite-simpson", "deer"])
def test_points_and_gradients(step: str) -> None:
    for given, expected in zip(solve("cuda", step), solve("cpu", step), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-11)


def test_a_guess_changes_nothing() -> None:
    plain = solve("cuda", "rk4")
    for given, expected in zip(solve("cuda", "rk4", guess=plain[0].cuda()), plain, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-11)


def test_two_bodies() -> None:
    first = orbits(3, torch.Generator().manual_seed(0)).double()
    t = torch.linspace(0, 10, 1001, dtype=torch.float64)
    expected = tl.odeint(attraction, first, t)
    torch.testing.assert_close(tl.odeint(attraction, first.cuda(), t.cuda()).cpu(), expected, rtol=1e-8, atol=1e-9)
    torch.manual_seed(0)
    model = Hamiltonian(8, 2, "softplus", "learned").double()
    by_device = []
    for device in ("cpu", "cuda"):
        loss = tl.odeint(model.to(device), first.to(device), t.to(device)).square().mean()
        model.zero_grad()
        loss.backward()
        by_device.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    for given, expected_grad in zip(*by_device, strict=True):
        torch.testing.assert_close(given, expected_grad, rtol=1e-7, atol=1e-9)
