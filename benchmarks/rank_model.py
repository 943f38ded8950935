"""What a training step over R ranks costs: a model with two constants, fitted to measured points, and its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COLLECTIVES, WARMUP = 8, 30
"""Of a training step of one layer with a loss over all steps, and a typical warm-up."""
PAPER = 6.5
"""The largest speedup that the multigrid paper reports, on CPUs."""
CLUSTER_ALPHA = 0.02
"""Milliseconds of an exchange a doubling of ranks, assumed for a cluster's network."""
H200 = {"fixed": 3.0, "per_step": 0.194 / 16384, "alone": 0.194 / 16384, "alpha": 0.015}
"""For GPUs: a call's fixed cost and its sweeps for n=32, B=1, as in results/gpu.md; NCCL's latency is assumed."""


@dataclass(frozen=True)
class Model:
    """Milliseconds: `max(1, R/cores) · (fixed + per_step · (T/R + warm-up)) + collectives · α(R)`."""

    fixed: float
    per_step: float

    def cost(self, ranks: int, steps: int, warmup: int, collectives: float, alpha: float, cores: float) -> float:
        turns = max(1.0, ranks / cores)
        return turns * (self.fixed + self.per_step * (steps / ranks + warmup)) + collectives * alpha

    def predict(self, point: Any, alpha: float, cores: float) -> float:
        """Of a measured point."""
        return self.cost(point.ranks, point.steps, point.warmup, point.collectives, alpha, cores)


def fit(points: Sequence[Any], alphas: dict[int, float], cores: int) -> Model:
    """The constants with the least relative error."""
    rows, targets = [], []
    for p in points:
        turns, rest = max(1.0, p.ranks / cores), p.milliseconds - p.collectives * alphas[p.ranks]
        rows.append([turns / p.milliseconds, turns * (p.steps / p.ranks + p.warmup) / p.milliseconds])
        targets.append([rest / p.milliseconds])
    fixed, per_step = torch.linalg.lstsq(torch.tensor(rows), torch.tensor(targets)).solution.clamp(min=0).flatten()
    return Model(float(fixed), float(per_step))


def plot(path: Path, model: Model, measured: Sequence[tuple[int, float, int]], alone: float) -> None:
    """Speed over one rank against the number of ranks: measured here, and what the model says of larger machines.

    alone: milliseconds a time step of the ordinary path on one thread.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = [2**k for k in range(1, 11)]
    figure, (strong, weak) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    gpu = Model(H200["fixed"], H200["per_step"])
    machines = [
        ("CPU cluster", model, alone, 0.0, CLUSTER_ALPHA, "#0b6e99"),
        ("H200 nodes", gpu, H200["alone"], H200["fixed"], H200["alpha"], "#c8553d"),
    ]
    for name, cost, each, fixed, latency, color in machines:
        for exponent, style in ((17, ":"), (20, "--"), (24, "-")):
            steps = 2**exponent
            speed = [
                (fixed + each * steps) / cost.cost(r, steps, WARMUP, COLLECTIVES, latency * math.log2(r), r)
                for r in ranks
            ]
            strong.plot(ranks, speed, style, color=color, label=f"{name}, T = 2^{exponent}")
        slice_steps = 2**16
        share = [
            (fixed + each * slice_steps) / cost.cost(r, r * slice_steps, WARMUP, COLLECTIVES, latency * math.log2(r), r)
            for r in ranks
        ]
        weak.plot(ranks, share, "-", color=color, label=f"{name}, T = 65,536 · R")
    for count, ratio, steps in measured:
        if count > 1:
            strong.plot([count], [ratio], "k.")
            strong.annotate(f"T={steps}", (count, ratio), fontsize=6, textcoords="offset points", xytext=(4, -2))
    strong.axhline(PAPER, color="#888888", linewidth=0.8)
    strong.annotate("multigrid paper: 6.5×", (300, PAPER * 1.1), fontsize=7, color="#666666")
    strong.set(xscale="log", yscale="log", xlabel="ranks", ylabel="speed over one rank", title="Strong scaling")
    weak.set(xscale="log", xlabel="ranks", ylabel="efficiency", title="Weak scaling", ylim=(0, 1.1))
    strong.legend(fontsize=7)
    weak.legend(fontsize=7)
    figure.suptitle("GRU, n = 32, B = 1: dots measured on 2 cores (4 ranks share them), lines predicted", fontsize=10)
    figure.savefig(path, dpi=130, facecolor="white")
    pyplot.close(figure)
