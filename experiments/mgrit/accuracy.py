"""Does training by inexact multigrid cost accuracy? A real series set, several seeds, serial inference on all weights.

    pip install --no-deps aeon        # the data sets lie in its wheel; nothing of it is imported
    python -m experiments.mgrit.accuracy

Four ways to train a classifier on its last state: the GRU and the implicit GRU serially, the implicit GRU with the
multigrid paper's setting (2 + 1 inexact cycles), and with exact multigrid. Each trained network is then tested twice:
with the way it was trained, and serially with the same weights. Writes results/accuracy.json and .png.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import timeloom as tl
from experiments.results import facts, save
from timeloom.solvers import MGRIT

FOLDER = Path(__file__).with_name("results")
HIDDEN, EPOCHS, RATE, SEEDS = 32, 60, 5e-3, (0, 1, 2, 3, 4)
SETS = {"BasicMotions": 1, "OSULeaf": 7}
"""Data sets, and how many samples of a series make one step."""
WAYS: dict[str, Callable[[int], nn.RNNBase]] = {
    "GRU, serial": lambda width: tl.GRU(width, HIDDEN, solver="sequential"),
    "implicit GRU, serial": lambda width: tl.ImplicitGRU(width, HIDDEN, solver="sequential"),
    "implicit GRU, multigrid as published": lambda width: tl.ImplicitGRU(width, HIDDEN, solver=MGRIT.paper()),
    "implicit GRU, exact multigrid": lambda width: tl.ImplicitGRU(width, HIDDEN, solver=MGRIT(coarsening=8, tol=1e-5)),
}


class Classifier(nn.Module):
    """A recurrent layer, and a linear one on its last state."""

    def __init__(self, recurrent: nn.RNNBase, classes: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.recurrent(x)
        return self.head(last[0])


def load(name: str, part: str, per_step: int) -> tuple[Tensor, list[str]]:
    """Series of one length, `(T, N, channels)`, scaled series by series, and their labels."""
    spec = importlib.util.find_spec("aeon")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the data sets lie in aeon's wheel: pip install --no-deps aeon")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / name / f"{name}_{part}.ts"
    lines = path.read_text().lower().split("@data\n")[1].strip().splitlines()
    fields = [line.split(":") for line in lines]
    series = [torch.tensor([[float(v) for v in channel.split(",")] for channel in row[:-1]]).t() for row in fields]
    samples = torch.stack([(one - one.mean(0)) / one.std(0).clamp(min=1e-6) for one in series], 1)
    steps = len(samples) // per_step * per_step
    return samples[:steps].unflatten(0, (-1, per_step)).transpose(1, 2).flatten(2), [row[-1] for row in fields]


def train(way: str, seed: int, data: dict[str, tuple[Tensor, Tensor]], classes: int) -> dict[str, float]:
    torch.manual_seed(seed)
    x, y = data["TRAIN"]
    model = Classifier(WAYS[way](x.shape[-1]), classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    began, batches = time.perf_counter(), max(1, round(len(y) / 64))
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y)).chunk(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x[:, rows]), y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    seconds = time.perf_counter() - began
    trained = accuracy(model, *data["TEST"])
    residual = max((value for report in model.recurrent.reports for value in report.residuals[-1:]), default=0.0)
    model.recurrent.solver = "sequential"
    return {
        "seed": seed, "as trained": trained, "serial inference": accuracy(model, *data["TEST"]),
        "train, serial inference": accuracy(model, x, y), "last residual": residual, "seconds": seconds,
    }  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(-1) == y).double().mean())


def main() -> None:
    results: dict[str, Any] = {}
    for name, per_step in SETS.items():
        parts = {part: load(name, part, per_step) for part in ("TRAIN", "TEST")}
        labels = sorted(set(parts["TRAIN"][1]))
        data = {part: (x, torch.tensor([labels.index(one) for one in y])) for part, (x, y) in parts.items()}
        results[name] = {"steps": len(data["TRAIN"][0]), "classes": len(labels), "ways": {}}
        for way in WAYS:
            runs = [train(way, seed, data, len(labels)) for seed in SEEDS]
            results[name]["ways"][way] = runs
            summary = {key: statistics.mean(run[key] for run in runs) for key in ("as trained", "serial inference")}
            print(name, way, {key: f"{value:.3f}" for key, value in summary.items()}, f"{runs[0]['seconds']:.1f} s")
    settings = {"hidden": HIDDEN, "epochs": EPOCHS, "rate": RATE, "batch": "about 64"}
    save("accuracy", {"settings": settings, "facts": facts(), "sets": results}, FOLDER)
    draw(results)


def draw(results: dict[str, Any]) -> None:
    figure = Figure(figsize=(5.5 * len(results), 3.6), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        for place, runs in enumerate(result["ways"].values()):
            for offset, color, key in ((-0.12, "#c8553d", "as trained"), (0.12, "#0b6e99", "serial inference")):
                values = [run[key] for run in runs]
                axis.plot([place + offset] * len(values), values, "o", color=color, alpha=0.4, markersize=4)
                axis.plot(place + offset, statistics.mean(values), "_", color=color, markersize=18, label=key)
            if place == 0:
                axis.legend(fontsize="small", loc="lower right")
        axis.set_xticks(range(len(result["ways"])), [way.replace(", ", ",\n") for way in result["ways"]], fontsize=7)
        axis.set_title(f"{name}: {result['steps']} steps, {result['classes']} classes")
        axis.set_ylabel("test accuracy")
    figure.savefig(FOLDER / "accuracy.png", dpi=110)


if __name__ == "__main__":
    main()
