"""Networks to count sweeps on: as initialised, with a long memory, with strong weights, and trained to remember."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import timeloom as tl

INPUTS, HIDDEN = 2, 8
LAYERS = {"GRU": tl.GRU, "LSTM": tl.LSTM}
REGIMES: dict[str, tuple[float, float]] = {
    "as initialised": (0.0, 1.0),
    "keep gate +4": (4.0, 1.0),
    "keep gate +6": (6.0, 1.0),
    "weights ×2": (0.0, 2.0),
    "weights ×4": (0.0, 4.0),
    "weights ×8": (0.0, 8.0),
}
"""What is added to the bias of the gate that keeps the state, and what the recurrent weights are multiplied by."""
TRAINED = "trained to remember"
LEARNED = 0.005
"""Mean squared error at which a network counts as trained; guessing the mean has 0.33."""


def latch(steps: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs `(T, B, 2)`: a random value and, every 50 steps or so, a mark; target: the value at the last mark."""
    value = 2 * torch.rand(steps, batch, generator=generator) - 1
    mark = torch.rand(steps, batch, generator=generator) < 0.02
    mark[0] = True
    last = torch.where(mark, torch.arange(steps)[:, None], 0).cummax(0).values
    return torch.stack([value, mark.float()], -1), value.gather(0, last)


def build(kind: str, regime: str) -> tuple[nn.RNNBase, dict[str, float]]:
    """A layer in a regime, in float64, and how its training ended."""
    torch.manual_seed(0)
    layer = LAYERS[kind](INPUTS, HIDDEN)
    if regime == TRAINED:
        told = train(layer)
    else:
        bias, scale = REGIMES[regime]
        with torch.no_grad():
            layer.weight_hh_l0 *= scale
            layer.bias_ih_l0[HIDDEN : 2 * HIDDEN] += bias
        told = {}
    return layer.double(), told


def train(layer: nn.RNNBase, most: int = 3000) -> dict[str, float]:
    """Train on the latch until it is learned."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(HIDDEN, 1)
    parameters = [*layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, 5e-3)
    average, step = 1.0, 0
    while average > LEARNED and step < most:
        step += 1
        x, target = latch(200, 32, generator)
        y, _ = layer(x)
        loss = (head(y).squeeze(-1) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average += 0.05 * (loss.item() - average)
    return {"steps": step, "error": average}
