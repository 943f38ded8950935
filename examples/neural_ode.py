"""Learn a spiral from noisy points: a neural ODE whose time steps are all solved at once.

python examples/neural_ode.py
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import timeloom as tl


class Field(nn.Module):
    """`dy/dt = f(y)`, a network of one hidden layer. t is `(N, 1)`, y is `(N, 2)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def spiral(t: Tensor, y: Tensor) -> Tensor:
    """The truth."""
    return y @ torch.tensor([[-0.2, 2.0], [-2.0, -0.2]], dtype=y.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="time steps of a trajectory")
    parser.add_argument("--updates", type=int, default=150, help="training steps")
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    t = torch.linspace(0, 5, options.steps + 1)
    start = torch.tensor([[2.0, 0.0], [0.0, 1.5], [-1.2, -1.2]])
    truth = tl.odeint(spiral, start, t)
    points = truth + 0.05 * torch.randn_like(truth)
    field = Field(options.width)
    optimiser = torch.optim.Adam(field.parameters(), lr=2e-2)
    reports: list[tl.SolveReport] = []
    guess = None
    for number in range(options.updates):
        began = time.perf_counter()
        path = tl.odeint(field, start, t, guess=guess, record=reports.append)
        loss = (path - points).abs().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        guess = path.detach()  # the next solve begins where this one ended
        if (number + 1) % 25 == 0 or number + 1 == options.updates:
            took = f"{time.perf_counter() - began:.3f} s, {reports[-1].iterations} sweeps"
            print(f"update {number + 1}: mean distance {loss:.4f} ({options.steps} time steps in {took})", flush=True)
    with torch.no_grad():
        learned = tl.odeint(field, start, t)
    print(f"distance from the true spiral: {(learned - truth).abs().mean():.4f} (noise: 0.05)")


if __name__ == "__main__":
    main()
