"""The zoo of trained networks: which layer, on which task, for how many steps; and their training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import timeloom as tl
from benchmarks.zoo.tasks import TASKS, Task

POOL = 8
"""Batches that are drawn once and trained on in turns."""


@dataclass(frozen=True)
class Network:
    """A layer and its training."""

    task: str
    layer: str
    units: int
    updates: int
    steps: int = 1024
    batch: int = 16
    rate: float = 3e-3
    sizes: tuple[tuple[int, int], ...] = ((16384, 1), (16384, 16))
    """T and B to measure at."""

    @property
    def name(self) -> str:
        return f"{self.task} {self.layer} {self.units}"


ZOO = (
    Network("flip-flop", "GRU", 64, 250),
    Network("flip-flop", "LSTM", 64, 250),
    Network("flip-flop", "GRU", 32, 250, sizes=((16384, 1),)),
    Network("adding", "GRU", 64, 200),
    Network("adding", "LSTM", 32, 200, sizes=((16384, 1),)),
    Network("amplifier", "LSTM", 32, 200, sizes=((16384, 1), (65535, 1))),
    Network("amplifier", "GRU", 32, 200, sizes=((16384, 1),)),
    Network("amplifier", "RNN", 32, 200, rate=1e-3, sizes=((16384, 1),)),
    Network("text", "GRU", 128, 200, 512, sizes=((16384, 1), (16384, 4))),
    Network("text", "LSTM", 128, 200, 512, sizes=((8192, 1), (8192, 4))),
    Network("text", "GRU", 256, 100, 512, sizes=((8192, 1),)),
    Network("text", "GRU", 512, 60, 256, sizes=((8192, 1),)),
)


class Model(nn.Module):
    """The layer between an embedding, of text, and a linear read-out. Trained by timeloom's layer: it is the same."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        task = TASKS[network.task]
        self.embedding = nn.Embedding(256, task.inputs) if task.text else None
        self.layer = getattr(tl, network.layer)(task.inputs, network.units)
        self.head = nn.Linear(network.units, task.answers)

    def features(self, x: Tensor) -> Tensor:
        return x if self.embedding is None else self.embedding(x)

    def loss(self, x: Tensor, answers: Tensor) -> Tensor:
        out = self.head(self.layer(self.features(x))[0])
        if self.embedding is None:
            return F.mse_loss(out, answers)
        return F.cross_entropy(out.flatten(0, 1), answers.flatten())


def trained(network: Network, device: torch.device, seed: int = 0) -> tuple[Model, float]:
    """The model after its training, and the loss it ended with."""
    torch.manual_seed(seed)
    task, generator = TASKS[network.task], torch.Generator().manual_seed(seed)
    model = Model(network).to(device)
    pool = [drawn(task, network.steps, network.batch, generator, device) for _ in range(POOL)]
    optimizer = torch.optim.Adam(model.parameters(), network.rate)
    loss = torch.zeros(())
    for update in range(network.updates):
        loss = model.loss(*pool[update % POOL])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, float(loss.detach())


def drawn(
    task: Task, steps: int, batch: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    x, answers = task.draw(steps, batch, generator)
    return x.to(device), answers.to(device)
