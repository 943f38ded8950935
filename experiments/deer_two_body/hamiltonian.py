"""Two bodies that attract each other: the truth, orbits, and a network that is to learn the energy."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Hamiltonian(nn.Module):
    """`f(t, y)` of Hamilton's equations `q' = ∂H/∂p`, `p' = −∂H/∂q`, with a network for the energy H(q, p).

    y holds positions q and momenta p, `(N, 8)`. Where the kinetic energy is given, `|p|²/2` is added to what is
    learned.
    """

    def __init__(self, width: int, layers: int = 2, activation: str = "tanh", kinetic: str = "given") -> None:
        super().__init__()
        act = {"tanh": nn.Tanh, "softplus": nn.Softplus}[activation]
        parts: list[nn.Module] = []
        for number in range(layers):
            parts += [nn.Linear(width if number else 8, width), act()]
        self.potential = nn.Sequential(*parts, nn.Linear(width, 1))
        self.kinetic = kinetic

    @torch.no_grad()
    def keep_scale(self) -> None:
        """Draw the weights anew, so that the slope of a layer is about 1: that of softplus is one half at zero, and six
        layers as torch draws them have next to none.
        """
        layers = [layer for layer in self.potential if isinstance(layer, nn.Linear)]
        for layer in layers:
            layer.weight.normal_(0, 1.7 / layer.in_features**0.5)
            layer.bias.zero_()
        layers[-1].weight.mul_(0.5)

    def energy(self, y: Tensor) -> Tensor:
        """H of every row, `(N,)`."""
        learned = self.potential(y).squeeze(-1)
        return learned + y[:, 4:].square().sum(-1) / 2 if self.kinetic == "given" else learned

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        on_tape = torch.is_grad_enabled()
        with torch.enable_grad():
            y = y if y.requires_grad else y.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(y).sum(), y, create_graph=on_tape)
        return torch.cat([slope[:, 4:], -slope[:, :4]], -1)


def attraction(t: Tensor, y: Tensor) -> Tensor:
    """The truth: two unit masses under gravity."""
    apart = y[:, 2:4] - y[:, :2]
    force = apart / apart.norm(dim=-1, keepdim=True) ** 3
    return torch.cat([y[:, 4:], force, -force], -1)


def orbits(count: int, generator: torch.Generator, drawn: str = "nearly circular") -> Tensor:
    """First points `(count, 8)` of orbits about the origin: radii of 0.8 … 1.2 at about the speed of a circle; as in
    the paper, of 0.5 … 1.5 at 0.7 … 1 of that speed.
    """
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    near, width = {"nearly circular": (0.8, 0.4), "as in the paper": (0.5, 1.0)}[drawn]
    radius = near + width * torch.rand(count, generator=generator)
    place = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    if drawn == "as in the paper":
        share = 0.7 + 0.3 * torch.rand(count, generator=generator)
    else:
        share = 1 + 0.1 * torch.randn(count, generator=generator)
    speed = (0.25 / radius).sqrt() * share
    motion = speed.unsqueeze(-1) * torch.stack([-angle.sin(), angle.cos()], -1)
    return torch.cat([place, -place, motion, -motion], -1)
