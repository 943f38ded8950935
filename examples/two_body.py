"""Learn the Hamiltonian of the two-body problem from orbits, with all time steps solved at once.

A network H(q, p) is trained so that the orbits of its Hamilton equations, `q' = ∂H/∂p`, `p' = −∂H/∂q`, are those of
two bodies that attract each other. An orbit is one trajectory of `timeloom.odeint` by the implicit midpoint rule,
which keeps energies, and the last epoch's orbits are where the next solve starts.

    python examples/two_body.py
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import timeloom as tl


class Hamiltonian(nn.Module):
    """`f(t, y)` of Hamilton's equations: kinetic energy plus a learned `V(q, p)`.

    y holds positions q and momenta p, `(N, 8)`.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        self.potential = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        on_tape = torch.is_grad_enabled()
        with torch.enable_grad():
            y = y if y.requires_grad else y.detach().requires_grad_()
            energy = self.potential(y).sum() + y[:, 4:].square().sum() / 2
            (slope,) = torch.autograd.grad(energy, y, create_graph=on_tape)
        return torch.cat([slope[:, 4:], -slope[:, :4]], -1)


def attraction(t: Tensor, y: Tensor) -> Tensor:
    """The truth: two unit masses under gravity."""
    apart = y[:, 2:4] - y[:, :2]
    force = apart / apart.norm(dim=-1, keepdim=True) ** 3
    return torch.cat([y[:, 4:], force, -force], -1)


def orbits(count: int) -> Tensor:
    """First points `(count, 8)` of nearly circular orbits about the origin."""
    angle, radius = 2 * torch.pi * torch.rand(count), 0.8 + 0.4 * torch.rand(count)
    place = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    speed = (0.25 / radius).sqrt() * (1 + 0.1 * torch.randn(count))
    motion = speed.unsqueeze(-1) * torch.stack([-angle.sin(), angle.cos()], -1)
    return torch.cat([place, -place, motion, -motion], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--steps", type=int, default=2000, help="time steps of an orbit")
    parser.add_argument("--orbits", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    t = torch.linspace(0, 10, options.steps + 1)
    first = orbits(options.orbits)
    truth = tl.odeint(attraction, first, t).detach()
    model = Hamiltonian(options.width)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    reports: list[tl.SolveReport] = []
    guess = None
    for epoch in range(options.epochs):
        began = time.perf_counter()
        orbit = tl.odeint(model, first, t, step="implicit-midpoint", guess=guess, record=reports.append)
        loss = (orbit - truth).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        guess = orbit.detach()
        if epoch % 10 == 0 or epoch == options.epochs - 1:
            took = f"{time.perf_counter() - began:.2f} s, {reports[-1].iterations} Newton steps"
            print(f"epoch {epoch:3d}  loss {loss.item():.2e}  ({options.steps} time steps in {took})", flush=True)
    fresh = orbits(options.orbits)
    with torch.no_grad():
        learned = tl.odeint(model, fresh, t, step="implicit-midpoint")
        still = (fresh - tl.odeint(attraction, fresh, t)).square().mean()
        error = (learned - tl.odeint(attraction, fresh, t)).square().mean()
    print(f"orbits never seen: squared error {error:.2e} (standing still: {still:.2e})")


if __name__ == "__main__":
    main()
