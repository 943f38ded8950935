"""Classify long series: which of two rhythms is hidden in the noise of 20,000 samples?

The training loop is an ordinary one; only the layer is timeloom's. At the end one step is repeated by torch's own
layer, from the same weights.

    python examples/long_series.py
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy

import torch
from torch import Tensor, nn

import timeloom as tl


class Classifier(nn.Module):
    """A GRU over all samples, and a vote of all its states."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.gru = tl.GRU(1, units)
        self.head = nn.Linear(units, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        return self.head(states).mean(dim=0)


def draw(steps: int, batch: int) -> tuple[Tensor, Tensor]:
    """Series `(T, B, 1)` of a slow or a fast oscillation in noise, and which of the two it is."""
    label = torch.arange(batch) % 2
    period = torch.where(label == 0, 40.0, 25.0)
    phase = torch.arange(steps).unsqueeze(1) / period + torch.rand(batch)
    return (torch.sin(2 * torch.pi * phase) + torch.randn(steps, batch)).unsqueeze(-1), label


def step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, label: Tensor) -> tuple[float, float]:
    """One training step; its loss and its seconds."""
    began = time.perf_counter()
    loss = nn.functional.cross_entropy(model(x), label)
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item(), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=20_000, help="samples in a series")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--units", type=int, default=24)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Classifier(options.units)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in range(options.steps):
        loss, seconds = step(model, optimiser, *draw(options.length, options.batch))
        if number % 10 == 9:
            print(f"step {number + 1}: loss {loss:.3f}, {seconds:.3f} s", flush=True)
    print(f"the last solve: {model.gru.reports[0]}")
    with torch.no_grad():
        x, label = draw(options.length, 32)
        print(f"right on new series: {(model(x).argmax(-1) == label).float().mean():.0%}")
    x, label = draw(options.length, options.batch)
    twin = tl.sequentialize(deepcopy(model))
    theirs, slow = step(twin, torch.optim.Adam(twin.parameters()), x, label)
    ours, fast = step(model, optimiser, x, label)
    print(f"one step by torch's layer: loss {theirs:.6f}, {slow:.2f} s; by timeloom: {ours:.6f}, {fast:.3f} s")


if __name__ == "__main__":
    main()
