"""Two bodies that attract each other: the truth, orbits, and a network that is to learn the energy."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Hamiltonian(nn.Module):
    """`f(t, y)` of Hamilton's equations `q' = ∂H/∂p`, `p' = −∂H/∂q`: kinetic energy plus a learned `V(q, p)`.

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


def orbits(count: int, generator: torch.Generator) -> Tensor:
    """First points `(count, 8)` of nearly circular orbits about the origin."""
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    radius = 0.8 + 0.4 * torch.rand(count, generator=generator)
    place = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    speed = (0.25 / radius).sqrt() * (1 + 0.1 * torch.randn(count, generator=generator))
    motion = speed.unsqueeze(-1) * torch.stack([-angle.sin(), angle.cos()], -1)
    return torch.cat([place, -place, motion, -motion], -1)
