"""The task of the BPPSA paper: streams of bits of ten kinds, and an Elman network whose last state tells the kind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.solvers import Auto, Shooting, Solver

HIDDEN, CLASSES, BATCH = 20, 10, 16
SOLVERS: dict[str, Solver | None] = {
    "torch": None,
    "chunked adjoint": Shooting(),
    "scan": Shooting(adjoint="scan"),
    "scan, 2 levels": Shooting(adjoint="scan", adjoint_levels=2),
    "scan, all levels": Shooting(adjoint="scan", adjoint_levels=30),
}
"""None is torch's own layer: cuDNN on a GPU."""
IN_ORDER = 2**30
"""A chunk as long as any sequence."""
TRAINED: dict[str, Solver | None] = {
    "torch": None,
    "default": Auto(),
    "scan": Shooting(chunk=IN_ORDER, adjoint="scan"),
}
"""The scan's forward pass is in order, as the paper's: networks that learn to count do not contract."""


class Classifier(nn.Module):
    """An Elman network whose last state tells the class."""

    def __init__(self, solver: Solver | None) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, HIDDEN) if solver is None else tl.RNN(1, HIDDEN, solver=solver)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[1][0])


def bits(steps: int, count: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Streams `(T, N, 1)` and their classes `(N,)`: class c draws ones with probability 0.05 + 0.1 c."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    streams = (torch.rand(steps, count, generator=generator) < 0.05 + 0.1 * classes).float().unsqueeze(-1)
    return streams.to(device), classes.to(device)


def models(ways: dict[str, Solver | None], device: str) -> dict[str, Classifier]:
    """The same network for every way."""
    made = {}
    for name, solver in ways.items():
        torch.manual_seed(0)
        made[name] = Classifier(solver).to(device)
    return made
