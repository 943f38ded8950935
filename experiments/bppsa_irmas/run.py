"""A GRU that hears instruments, trained with gradients by torch, by timeloom's default and by scans.

    python -m experiments.bppsa_irmas.run                               # generated clips; about two minutes on one core
    python -m experiments.bppsa_irmas.run --data IRMAS-TrainingData     # the real ones
    python -m experiments.bppsa_irmas.run --fast                        # all parts in small, seconds

The second recurrent task of the BPPSA paper: a GRU of 20 units reads the MFCC of three-second clips, in 259, 517 or
1034 steps by the hop between frames, batch 16, and its last state tells the instrument. Every method trains a copy of
the same network on the same batches. Measured are the gradients against float64, as initialised and as trained, and
the time of the backward pass alone and of a whole training step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import timeloom as tl
from experiments.bppsa_irmas import report
from experiments.bppsa_irmas.clips import features, find, split
from experiments.bppsa_irmas.instruments import INSTRUMENTS, generate
from experiments.harness import command, facts, target, write
from timeloom.solvers import Auto, Shooting, Solver

HOPS, FAST_HOPS = (512, 256, 128), (4096, 2048, 1024)
"""Samples between two frames."""
HIDDEN, BATCH, RATE_OF_LEARNING, MOST_NORM = 20, 16, 2e-2, 1.0
METHODS: dict[str, Solver | None] = {
    "torch": None,
    "default": Auto(),
    "scan": Shooting(adjoint="scan"),
    "scan, 2 levels": Shooting(adjoint="scan", adjoint_levels=2),
    "scan, all levels": Shooting(adjoint="scan", adjoint_levels=30),
}
"""Solvers by name; None is torch's own layer."""


@dataclass(frozen=True)
class Data:
    """Features `(T, N, D)` of one hop, standardised by those to train on, and instruments `(N,)`."""

    x: Tensor
    target: Tensor
    test_x: Tensor
    test_target: Tensor


class Classifier(nn.Module):
    """A GRU whose last state tells the class."""

    def __init__(self, solver: Solver | None, inputs: int, classes: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, HIDDEN) if solver is None else tl.GRU(inputs, HIDDEN, solver=solver)
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.gru(x)
        return self.head(last[0])


def load(folder: Path, most: int, hops: Sequence[int]) -> tuple[list[str], dict[int, Data]]:
    """Instruments, and the data by hop."""
    instruments, clips = find(folder, most)
    train, test = split(clips)
    (x, target), (test_x, test_target) = features(train, hops), features(test, hops)
    data = {}
    for hop in hops:
        mean, spread = x[hop].mean((0, 1)), x[hop].std((0, 1)) + 1e-6
        data[hop] = Data((x[hop] - mean) / spread, target, (test_x[hop] - mean) / spread, test_target)
    return instruments, data


def train(model: Classifier, data: Data, steps: int) -> list[float]:
    """The loss of every step."""
    generator = torch.Generator().manual_seed(0)
    optimizer, losses = torch.optim.Adam(model.parameters(), RATE_OF_LEARNING), []
    rows: Tensor = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(rows) < BATCH:
            rows = torch.cat([rows, torch.randperm(len(data.target), generator=generator)])
        now, rows = rows[:BATCH], rows[BATCH:]
        optimizer.zero_grad()
        loss = cross_entropy(model(data.x[:, now]), data.target[now])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def answers(model: Classifier, data: Data) -> Tensor:
    """The instruments that it hears in the clips to test on, `(N,)`."""
    return model(data.test_x).argmax(-1)


def gradients(model: Classifier, x: Tensor, target: Tensor) -> list[Tensor]:
    """Of the loss by the inputs and all parameters."""
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(cross_entropy(model(x), target), [x, *model.parameters()]))


def errors(models: dict[str, Classifier], x: Tensor, target: Tensor) -> dict[str, float]:
    """By method, the largest error of any gradient against float64, relative to that gradient's largest entry."""
    truth = gradients(copy.deepcopy(models["torch"]).double(), x.double(), target)
    return {
        name: max(
            float((given - true).abs().max() / true.abs().max())
            for given, true in zip(gradients(model, x, target), truth, strict=True)
        )
        for name, model in models.items()
    }


def times(models: dict[str, Classifier], x: Tensor, target: Tensor, turns: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of the backward pass and of the whole step (forward, backward, update), methods in turn."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    optimizers = {name: torch.optim.Adam(model.parameters(), 0.0) for name, model in models.items()}
    for turn in range(turns + 1):
        for name, model in models.items():
            began = time.perf_counter()
            backward = _step(
                model, optimizers[name], x, target
            )  # its tape is gone when it returns: that costs time too
            if turn:  # the first one warms up
                taken[name].append((1e3 * backward, 1e3 * (time.perf_counter() - began)))
    found: dict[str, dict[str, Any]] = {}
    for name, pairs in taken.items():
        backwards, steps = zip(*pairs, strict=True)
        found[name] = {
            kind: {"fastest": min(column), "median": statistics.median(column), "slowest": max(column)}
            for kind, column in (("backward_ms", backwards), ("step_ms", steps))
        }
        solved = models[name].gru.reports[0].backward if METHODS[name] is not None else None
        if solved is not None:
            found[name]["backward_solve"] = {"solver": solved.solver, "sweeps": solved.iterations}
    return found


def _step(model: Classifier, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> float:
    """One training step; the seconds of its backward pass."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x), target)
    began = time.perf_counter()
    loss.backward()
    taken = time.perf_counter() - began
    optimizer.step()
    return taken


def compare(data: Data, classes: int, steps: int, turns: int) -> dict[str, Any]:
    """All methods on one length."""
    torch.manual_seed(0)
    start = Classifier(None, data.x.shape[-1], classes).state_dict()
    models = {name: Classifier(solver, data.x.shape[-1], classes) for name, solver in METHODS.items()}
    batch = torch.arange(BATCH) * len(data.target) // BATCH  # clips are in order of instruments: some of each
    x, target = data.x[:, batch].contiguous(), data.target[batch]
    for model in models.values():
        model.load_state_dict(start)
    at_start, losses, heard = errors(models, x, target), {}, {}
    for name, model in models.items():
        losses[name] = train(model, data, steps)
        heard[name] = answers(model, data)
    for model in models.values():
        model.load_state_dict(models["torch"].state_dict())
    at_end, taken = errors(models, x, target), times(models, x, target, turns)
    return {
        name: {
            **taken[name],
            "gradient_error": {"as_initialised": at_start[name], "as_trained": at_end[name]},
            "accuracy": float((heard[name] == data.test_target).float().mean()),
            "answers_unlike_torch": int((heard[name] != heard["torch"]).sum()),
            "largest_loss_difference": max(abs(a - b) for a, b in zip(losses[name], losses["torch"], strict=True)),
            "losses": [round(loss, 6) for loss in losses[name]],
        }
        for name in METHODS
    }


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 up is needed, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--data", type=Path, help="a folder in IRMAS's layout; without it, clips are generated")
    parser.add_argument(
        "--clips", type=_count, help="most clips of an instrument, to train and to test on (default 32)"
    )
    parser.add_argument("--steps", type=_count, help="training steps (default 80)")
    options = parser.parse_args(arguments)
    hops = FAST_HOPS if options.fast else HOPS
    most, steps = options.clips or (4 if options.fast else 32), options.steps or (3 if options.fast else 80)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or Path(temporary)
        if options.data is None:
            generate(folder, most, tuple(INSTRUMENTS)[: 3 if options.fast else None])
        try:
            instruments, data = load(folder, most, hops)
        except ValueError as error:
            parser.error(str(error))
    first, turns = next(iter(data.values())), 2 if options.fast else 7
    results: dict[str, Any] = {
        "data": "generated stand-in" if options.data is None else "IRMAS",
        "instruments": instruments,
        "clips": {"train": len(first.target), "test": len(first.test_target)},
        "hidden": HIDDEN,
        "batch": BATCH,
        "training_steps": steps,
        "turns": turns,
        "machine": facts(),
        "lengths": {},
    }
    print(f"{results['data']} clips: {results['clips']}", flush=True)
    for hop in hops:
        found = compare(data[hop], len(instruments), steps, turns)
        results["lengths"][str(len(data[hop].x))] = {"hop": hop, "methods": found}
        print(report.row(len(data[hop].x), found), flush=True)
    folder = target(options, __file__)
    if folder is not None:
        write("irmas" if options.data else "generated", results, folder, report.table, report.plot)


if __name__ == "__main__":
    main()
