"""Random networks and solves, of every memory: gates biased to remember, recurrent weights up to four times larger."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from timeloom.cells import GRUCell, LSTMCell, RNNCell
from timeloom.problem import Recurrence
from timeloom.solve.plan import Correction
from timeloom.solvers import Shooting

CELLS: dict[str, Any] = {"GRU": GRUCell, "LSTM": LSTMCell, "RNN": RNNCell}
CORRECTIONS: tuple[Correction, ...] = ("none", "diag", "secant", "lowrank", "newton", "auto")


@dataclass(frozen=True)
class Case:
    """A network, its inputs and how it is solved, from one seed."""

    seed: int
    kind: str
    units: int
    steps: int
    batch: int
    bias: float
    scale: float
    chunk: int
    warmup: int
    correction: Correction
    tol: float
    dtype: torch.dtype

    @property
    def solver(self) -> Shooting:
        return Shooting(
            chunk=self.chunk, warmup=self.warmup, correction=self.correction, tol=self.tol, rank=3, max_iters=60
        )

    def problem(self, device: str = "cpu") -> Recurrence:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            layer = getattr(nn, self.kind)(3, self.units)
            x, initial = torch.randn(self.steps, self.batch, 3), 0.5 * torch.randn(self.batch, 2 * self.units)
        weights = {name: weight.detach().to(device, self.dtype) for name, weight in layer.named_parameters()}
        weights["weight_hh_l0"] *= self.scale
        if self.kind != "RNN":
            weights["bias_ih_l0"][self.units : 2 * self.units] += self.bias
        cell, u = CELLS[self.kind].project(x.to(device, self.dtype), *weights.values())
        return Recurrence(cell, u, initial[:, : cell.size].to(device, self.dtype))


def drawn(seed: int, kernels: bool = False) -> Case:
    """The case of a seed; `kernels`: in float32, as a GPU's kernels need."""
    rng = random.Random(seed)
    chunk = rng.choice([3, 4, 8, 16, 32])
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    dtype = torch.float32 if kernels else dtype
    return Case(
        seed=seed,
        kind=rng.choice(["GRU", "GRU", "LSTM", "RNN"]),
        units=rng.choice([3, 6, 10, 16]),
        steps=rng.choice([96, 256, 600]),
        batch=rng.choice([1, 2, 3]),
        bias=rng.uniform(0, 6),
        scale=rng.uniform(1, 4),
        chunk=chunk,
        warmup=rng.choice([0, chunk // 2, chunk]),
        correction=rng.choice(CORRECTIONS),
        tol=10 ** rng.uniform(-9 if dtype == torch.float64 else -5, -2),
        dtype=dtype,
    )
