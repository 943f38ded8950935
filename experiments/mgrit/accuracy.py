"""Does training by inexact multigrid cost accuracy? A real series set, several seeds, serial inference on all weights.

    pip install --no-deps aeon        # the data sets lie in its wheel; nothing of it is imported
    python -m experiments.mgrit.accuracy

Four ways to train a classifier on its last state: the GRU and the implicit GRU serially, the implicit GRU with the
multigrid paper's setting (2 + 1 inexact cycles), and with exact multigrid. Each trained network is then tested twice:
with the way it was trained, and serially with the same weights. Without aeon, or with
--fast, the series are generated.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import timeloom as tl
from experiments.harness import Clock, Results, begin, command, facts, figure, folder_of, made_on, markdown, write
from timeloom.solvers import MGRIT

HIDDEN, RATE = 32, 5e-3
FULL, FAST = {"epochs": 60, "seeds": 5}, {"epochs": 1, "seeds": 1}
GENERATED = "generated series"
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


def train(way: str, seed: int, data: dict[str, tuple[Tensor, Tensor]], classes: int, epochs: int) -> dict[str, float]:
    torch.manual_seed(seed)
    x, y = data["TRAIN"]
    model = Classifier(WAYS[way](x.shape[-1]), classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    began, batches = time.perf_counter(), max(1, round(len(y) / 64))
    for _ in range(epochs):
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


def generated(part: str) -> tuple[Tensor, list[str]]:
    """Two classes of noisy waves, `(48, N, 2)`: a stand-in where no archive is at hand."""
    generator = torch.Generator().manual_seed(len(part))
    labels = torch.arange(16) % 2
    phase = 6.28 * torch.rand(16, generator=generator)
    wave = torch.sin(torch.arange(48)[:, None] * (0.2 + 0.15 * labels) + phase)
    noise = 0.3 * torch.randn(48, 16, 2, generator=generator)
    return wave.unsqueeze(-1) + noise, [str(int(label)) for label in labels]


def measure(sizes: dict[str, int], real: bool, clock: Clock) -> Results:
    sets: Results = {}
    for name, per_step in SETS.items() if real else ((GENERATED, 1),):
        parts = {part: load(name, part, per_step) if real else generated(part) for part in ("TRAIN", "TEST")}
        labels = sorted(set(parts["TRAIN"][1]))
        data = {part: (x, torch.tensor([labels.index(one) for one in y])) for part, (x, y) in parts.items()}
        sets[name] = {"steps": len(data["TRAIN"][0]), "classes": len(labels), "ways": {}}
        for way in WAYS:
            if clock.over:
                break
            runs = [train(way, seed, data, len(labels), sizes["epochs"]) for seed in range(sizes["seeds"])]
            sets[name]["ways"][way] = runs
            told = {key: statistics.mean(run[key] for run in runs) for key in ("as trained", "serial inference")}
            print(
                name,
                way,
                {key: f"{value:.3f}" for key, value in told.items()},
                f"{runs[0]['seconds']:.1f} s",
                flush=True,
            )
    return sets


def table(results: Results) -> str:
    """A line for each set and way: mean and spread over the seeds."""
    cells = []
    for name, found in results["sets"].items():
        for way, runs in found["ways"].items():
            columns = [[100 * run[key] for run in runs] for key in ("as trained", "serial inference")]
            spread = [f"{statistics.mean(c):.1f} ± {statistics.stdev(c) if len(c) > 1 else 0:.1f} %" for c in columns]
            cells.append([f"{name} ({found['steps']} steps)", way, *spread])
    about = results["settings"]
    return "\n".join([
        f"{about['hidden']} units, {about['epochs']} epochs of Adam at {about['rate']}; {made_on(results['machine'])}.",
        "",
        *markdown(["set", "way", "as trained", "serial inference"], cells, 2),
    ]) + "\n"  # fmt: skip


def draw(results: Results, path: Path) -> None:
    sets = results["sets"]
    drawn, axes = figure(5.5 * len(sets), 3.6, 1, len(sets))
    for axis, (name, result) in zip(axes[0], sets.items(), strict=True):
        for place, runs in enumerate(result["ways"].values()):
            for offset, color, key in ((-0.12, "#c8553d", "as trained"), (0.12, "#0b6e99", "serial inference")):
                values = [run[key] for run in runs]
                axis.plot([place + offset] * len(values), values, "o", color=color, alpha=0.4, markersize=4)
                axis.plot(place + offset, statistics.mean(values), "_", color=color, markersize=18, label=key)
            if place == 0:
                axis.legend(fontsize="small", loc="lower right")
        axis.set_xticks(range(len(result["ways"])), [way.replace(", ", ",\n") for way in result["ways"]], fontsize=7)
        axis.set_title(f"{name}: {result['steps']} steps, {result['classes']} classes")
        axis.set_ylabel("test accuracy, a point a seed, lines: means")
    drawn.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__, gpu=False), arguments)
    sizes = FAST if options.fast else FULL
    real = not options.fast and importlib.util.find_spec("aeon") is not None
    if not real:
        print(
            f"{GENERATED}: " + ("--fast" if options.fast else "aeon, whose wheel holds the real ones, is not installed")
        )
    settings = {"hidden": HIDDEN, "rate": RATE, "batch": "about 64", **sizes}
    results = {"settings": settings, "machine": facts(), "sets": measure(sizes, real, options.clock)}
    write("accuracy" if real else "generated_accuracy", results, folder_of(options, __file__), table, draw)


if __name__ == "__main__":
    main()
