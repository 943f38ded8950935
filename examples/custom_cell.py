"""A recurrent cell of your own, parallel in time: units that forget at rates they learn.

The cell has to become a weather station: from noisy readings, give their running means over short and long times, at
every step. `check_cell` says whether it keeps the promises that solving in parallel relies on and whether kernels are
made for it, `unroll` runs it. At the end a training step is timed beside a plain loop and beside `tl.GRU`.

    python examples/custom_cell.py
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import timeloom as tl

RATES = (0.5, 0.2, 0.05)
"""Share of a running mean that a new reading replaces."""


class Leaky(nn.Module):
    """`h⁺ = (1 − a) h + a (W tanh(h) + V x)`, with a learned rate `a = σ(r)` for each unit."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.recurrent = nn.Linear(units, units)
        self.input = nn.Linear(inputs, units, bias=False)
        self.rate = nn.Parameter(torch.linspace(-3, 1, units))
        nn.init.normal_(self.recurrent.weight, std=0.1 / units)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a = self.rate.sigmoid()
        return (1 - a) * h + a * (self.recurrent(h.tanh()) + self.input(x))


def draw(steps: int, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Readings `(T, B, 1)` and their running means `(T, B, 3)`, which are a linear recurrence."""
    readings = torch.randn(steps, batch, 1, device=device) + torch.randn(batch, 1, device=device)
    rates = torch.tensor(RATES, device=device)
    return readings, tl.linear_scan((1 - rates).expand(steps, batch, 3), rates * readings)


def seconds(step: Callable[[], Tensor], times: int) -> float:
    """Of a forward and a backward pass, the shortest of a few."""
    best = math.inf
    for _ in range(times):
        began = time.perf_counter()
        step().square().mean().backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def compare(cell: nn.Module, h0: Tensor, xs: Tensor) -> None:
    """Print what a training step takes beside a plain loop and beside a GRU of as many units."""
    gru = tl.GRU(xs.shape[-1], h0.shape[-1]).to(xs.device)

    def loop() -> Tensor:
        states = [h0]
        for x in xs:
            states.append(cell(states[-1], x))
        return torch.stack(states[1:])

    own, plain = seconds(lambda: tl.unroll(cell, h0, xs)[0], 5), seconds(loop, 1)
    print(f"{plain / own:.1f} times as fast as a loop, {own / seconds(lambda: gru(xs)[0], 5):.1f} times a GRU's time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"length": 4000, "steps": 80, "batch": 2, "units": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    cell, head = Leaky(1, options.units).to(options.device), nn.Linear(options.units, len(RATES)).to(options.device)
    h0 = torch.zeros(options.batch, options.units, device=options.device)
    print(tl.check_cell(cell, h0, draw(1, options.batch, options.device)[0][0]))
    optimiser = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-2)
    for number in range(options.steps):
        xs, target = draw(options.length, options.batch, options.device)
        states, report = tl.unroll(cell, h0, xs)
        loss = (head(states) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimiser.step()
        if (number + 1) % 20 == 0 or number + 1 == options.steps:
            print(f"step {number + 1}: squared error {loss:.4f} (of {target.square().mean():.4f})", flush=True)
    print(report)
    compare(cell, h0, draw(options.length, options.batch, options.device)[0])


if __name__ == "__main__":
    main()
