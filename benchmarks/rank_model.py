"""The cost of a training step over R ranks: a model with two constants, fitted to measured points, and its picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COLLECTIVES, WARMUP = 7, 30
"""Small collectives in a training step of one layer with a loss over all steps, and a typical warm-up."""
KILOBYTES = 25
"""Size of the weights' gradients for n = 32, which ranks sum in one more collective."""
RING_UP_TO = 8
"""Ranks up to which small collectives use a ring; with more, log₂ R rounds (timeloom.distributed.group)."""
PAPER = 6.5
"""The largest speedup that the multigrid paper reports, on CPUs."""
NODE = 8
"""GPUs per node."""
NVLINK_GB, NETWORK_GB, ETHERNET_GB = 450.0, 50.0, 12.5
"""GB a second in one direction: NVLink 4 (900 both ways, NVIDIA's data sheet of the H200), InfiniBand NDR (400 Gb/s),
and 100 Gb Ethernet for the CPU cluster: nominal values."""
NCCL_RING, NCCL_TREE, NCCL_NVLINK, NCCL_NETWORK, NCCL_TREE_NETWORK = 3.6e-3, 4.4e-3, 0.5e-3, 2.7e-3, 5.0e-3
"""Milliseconds in the protocol for small messages, to start a ring and a tree, and for a hop on NVLink, between nodes,
and between nodes of a tree, as in NCCL's own model (github.com/NVIDIA/nccl, src/graph/tuning.cc; NVLink 1.8 × slower
with several nodes)."""
NCCL_LAUNCH = 0.02
"""Milliseconds to launch a pair of messages: an assumption."""
H200_FIXED, H200_PER_STEP = 3.0, 0.194 / 16384
"""Milliseconds per call and per time step for n = 32, B = 1, measured on one H200 (results/gpu.md)."""


@dataclass(frozen=True)
class Model:
    """Milliseconds: `max(1, R/cores) · (fixed + per_step · (T/R + warm-up)) + collectives · α(R) + bytes / β`."""

    fixed: float
    per_step: float

    def compute(self, ranks: int, steps: int, warmup: int) -> float:
        """Milliseconds that one rank computes."""
        return self.fixed + self.per_step * (steps / ranks + warmup)

    def cost(self, ranks: int, steps: int, warmup: int, talk: float, cores: float) -> float:
        """`talk`: milliseconds of all exchanges."""
        return max(1.0, ranks / cores) * self.compute(ranks, steps, warmup) + talk


def fit(points: Sequence[Any]) -> tuple[Model, Model]:
    """Models of one rank by itself and of several, with fixed costs of their own and a common cost per time step.

    Fitted for the least relative error in the time that a rank computes.
    """
    rows = [
        [float(p.ranks == 1), float(p.ranks > 1), p.steps / p.ranks + (p.warmup if p.ranks > 1 else 0)] for p in points
    ]
    scaled = torch.tensor(rows) / torch.tensor([[p.computing] for p in points])
    alone, several, per_step = torch.linalg.lstsq(scaled, torch.ones(len(rows), 1)).solution.flatten().tolist()
    return Model(max(0.0, alone), per_step), Model(max(0.0, several), per_step)


@dataclass(frozen=True)
class Machine:
    """A machine to predict for: the cost of a rank's computing, and of an exchange between R ranks."""

    name: str
    color: str
    model: Model
    alone: Model
    """The model of one rank by itself, on the ordinary path."""
    talk: Callable[[int], float]
    """`talk(ranks)`: milliseconds of all exchanges of a training step."""

    def speed(self, ranks: int, steps: int) -> float:
        """Speedup over one rank with the same sequence."""
        alone = self.alone.cost(1, steps, 0, 0.0, 1)
        return alone / self.model.cost(ranks, steps, WARMUP, self.talk(ranks), ranks)

    def efficiency(self, ranks: int, steps: int) -> float:
        """Efficiency of ranks with `steps` steps each, against one rank with as many."""
        return self.alone.cost(1, steps, 0, 0.0, 1) / self.model.cost(
            ranks, ranks * steps, WARMUP, self.talk(ranks), ranks
        )


def cpu_cluster(alone: Model, model: Model, hop: float) -> Machine:
    """Cores like those measured here; every hop takes as long as was measured between two processes."""

    def talk(ranks: int) -> float:
        ring = 2 * (ranks - 1) * hop + _bandwidth(ranks, ETHERNET_GB)
        return COLLECTIVES * hop * (ranks - 1 if ranks <= RING_UP_TO else math.ceil(math.log2(ranks))) + ring

    return Machine("CPU cluster", "#0b6e99", model, alone, talk)


def h200_nodes() -> Machine:
    """Nodes of 8 GPUs, NVLink inside and InfiniBand between them; NCCL's rings, trees and messages."""

    def talk(ranks: int) -> float:
        if ranks <= NODE:
            small, tree, gigabytes = NCCL_RING + (ranks - 1) * NCCL_NVLINK, 2 * (ranks - 1) * NCCL_NVLINK, NVLINK_GB
        else:  # every round beyond the first three leaves the node
            rounds, nodes = math.ceil(math.log2(ranks)), ranks // NODE
            small = rounds * NCCL_LAUNCH + 3 * NCCL_NVLINK + (rounds - 3) * NCCL_NETWORK
            tree = 2 * ((NODE - 1) * 1.8 * NCCL_NVLINK + math.ceil(math.log2(nodes)) * NCCL_TREE_NETWORK)
            gigabytes = NETWORK_GB
        return COLLECTIVES * small + NCCL_TREE + tree + _bandwidth(ranks, gigabytes)

    model = Model(H200_FIXED, H200_PER_STEP)
    return Machine("H200 nodes", "#c8553d", model, model, talk)


def _bandwidth(ranks: int, gigabytes: float) -> float:
    """Milliseconds to transfer the weights' gradients, twice through every link."""
    return 2 * (ranks - 1) / ranks * KILOBYTES * 1024 / (gigabytes * 1e6)


def table(machines: Sequence[Machine]) -> list[str]:
    """A table of predicted speedups."""
    ranks = (8, 64, 256, 1024)
    lines = [
        "| predicted | " + " | ".join(f"{r} ranks" for r in ranks) + " | best |",
        "|---|" + "--:|" * (len(ranks) + 1),
    ]
    for machine in machines:
        for exponent in (17, 20, 24):
            speeds = {2**k: machine.speed(2**k, 2**exponent) for k in range(1, 11)}
            best = max(speeds, key=lambda count: speeds[count])
            cells = " | ".join(f"{speeds[r]:.3g}×" for r in ranks)
            lines.append(f"| {machine.name}, T = 2^{exponent} | {cells} | {speeds[best]:.3g}× at {best} |")
        cells = " | ".join(f"{100 * machine.efficiency(r, 2**20):.0f} %" for r in ranks)
        lines.append(f"| {machine.name}, T = 2^20 · R: efficiency | {cells} | |")
    return lines


def plot(path: Path, machines: Sequence[Machine], measured: Sequence[tuple[int, float, int]]) -> None:
    """Plot the speedup over one rank against the number of ranks: measured here, and predicted for larger machines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = [2**k for k in range(1, 11)]
    figure, (strong, weak) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for machine in machines:
        for exponent, style in ((17, ":"), (20, "--"), (24, "-")):
            speed = [machine.speed(r, 2**exponent) for r in ranks]
            strong.plot(ranks, speed, style, color=machine.color, label=f"{machine.name}, T = 2^{exponent}")
        for exponent, style in ((16, ":"), (20, "--")):
            share = [machine.efficiency(r, 2**exponent) for r in ranks]
            weak.plot(ranks, share, style, color=machine.color, label=f"{machine.name}, T = 2^{exponent} · R")
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
    figure.suptitle(
        "GRU, n = 32, B = 1: lines predicted; dots: processor time of one rank over that of each of several, measured",
        fontsize=10,
    )
    figure.savefig(path, dpi=130, facecolor="white")
    pyplot.close(figure)
