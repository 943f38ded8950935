"""An Elman network that tells bit streams apart, with gradients by torch, by the chunked adjoint and by scans.

    python -m experiments.bppsa_bitstream.run            # about four minutes on one core
    python -m experiments.bppsa_bitstream.run --fast     # all parts in small, seconds

The first recurrent task of the BPPSA paper, whose data are generated there too: class c of ten draws its bits with
probability 0.05 + 0.1 c, an RNN of 20 tanh units reads them, batch 16, and its last state tells the class. Measured are
the backward pass alone by length, how far its gradients are from torch's, and a training by each of three ways. Times
are those of the process: other work on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import timeloom as tl
from experiments.harness import command, facts, target, write
from timeloom.solvers import Auto, Shooting, Solver

HIDDEN, CLASSES, BATCH = 20, 10, 16
LENGTHS, TRAINED_LENGTH, TRAINING_STEPS, TURNS = (1000, 3000, 10000, 30000), 1000, 1000, 3
FAST_LENGTHS, FAST_LENGTH, FAST_STEPS = (50, 130), 60, 12
LEARNING_RATE, MOST_NORM = 3e-3, 1.0
ALIKE = 100
"""Training steps over which losses are compared: later, gradients explode now and then, and rounding with them."""
SOLVERS: dict[str, Solver | str] = {
    "torch": "sequential",
    "chunked adjoint": Shooting(),
    "scan": Shooting(adjoint="scan"),
    "scan, 2 levels": Shooting(adjoint="scan", adjoint_levels=2),
    "scan, all levels": Shooting(adjoint="scan", adjoint_levels=30),
}
TRAINED: dict[str, Solver | str] = {"torch": "sequential", "default": Auto(), "scan": Shooting(adjoint="scan")}


class Classifier(nn.Module):
    """An Elman network whose last state tells the class."""

    def __init__(self, solver: Solver | str) -> None:
        super().__init__()
        self.rnn, self.head = tl.RNN(1, HIDDEN, solver=solver), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[1][0])


def bits(steps: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Streams `(T, N, 1)` and their classes `(N,)`."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    return (torch.rand(steps, count, generator=generator) < 0.05 + 0.1 * classes).float().unsqueeze(-1), classes


def backward(steps: int) -> dict[str, dict[str, float]]:
    """By solver, milliseconds of the fastest of a few backward passes, and the largest difference from torch's."""
    x, classes = bits(steps, BATCH, 0)
    found: dict[str, dict[str, float]] = {}
    truth: list[Tensor] = []
    for name, solver in SOLVERS.items():
        torch.manual_seed(0)
        model, taken = Classifier(solver), list[float]()
        for _ in range(TURNS):
            model.zero_grad()
            loss = cross_entropy(model(x), classes)
            began = time.process_time()
            loss.backward()
            taken.append(time.process_time() - began)
        gradients = [p.grad.clone() for p in model.rnn.parameters()]
        truth = truth or gradients
        apart = [float((g - t).abs().max() / t.abs().max()) for g, t in zip(gradients, truth, strict=True)]
        found[name] = {"ms": 1e3 * min(taken), "difference": max(apart)}
    return found


def train(solver: Solver | str, length: int, steps: int) -> dict[str, Any]:
    """Losses, the seconds until each of them, and the accuracy on new streams."""
    torch.manual_seed(0)
    model = Classifier(solver)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    losses, elapsed, seconds = list[float](), list[float](), 0.0
    for step in range(steps):
        x, classes = bits(length, BATCH, 1 + step)
        began = time.process_time()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), classes)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
        seconds += time.process_time() - began
        losses.append(round(loss.item(), 6))
        elapsed.append(round(seconds, 4))
    x, classes = bits(length, 40 * BATCH, 0)
    with torch.no_grad():
        answers = model(x).argmax(-1)
    return {"losses": losses, "elapsed": elapsed, "accuracy": float((answers == classes).float().mean())}


def table(results: dict[str, Any]) -> str:
    """Both parts in words."""
    lines = [f"| T | {' | '.join(SOLVERS)} | largest difference |", "| --: " * (len(SOLVERS) + 2) + "|"]
    for steps, found in results["backward"].items():
        worst = max(one["difference"] for one in found.values())
        times = " | ".join(f"{one['ms']:.3g} ms" for one in found.values())
        lines.append(f"| {steps} | {times} | {worst:.1e} |")
    about = results["training"]
    lines += [
        "",
        f"Training at T = {about['length']}, {about['steps']} steps of batch {BATCH} (losses compared over the first "
        f"{min(ALIKE, about['steps'])}):", "",
        "| way | time | over torch | last loss (mean of 20) | accuracy | losses differ from torch's by |",
        "| --- | --: | --: | --: | --: | --: |",
    ]  # fmt: skip
    base = about["ways"]["torch"]
    for name, one in about["ways"].items():
        apart = max(abs(a - b) for a, b in zip(one["losses"][:ALIKE], base["losses"][:ALIKE], strict=True))
        last = sum(one["losses"][-20:]) / len(one["losses"][-20:])
        lines.append(
            f"| {name} | {one['elapsed'][-1]:.1f} s | {base['elapsed'][-1] / one['elapsed'][-1]:.1f}× | {last:.3f} | "
            f"{one['accuracy']:.1%} | {apart:.1e} |"
        )
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Losses over steps and over time."""
    about = results["training"]
    plot_losses(about["ways"], f"generated bit streams, T = {about['length']}", path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = command(__doc__).parse_args(arguments)
    lengths, length, steps = (
        (FAST_LENGTHS, FAST_LENGTH, FAST_STEPS) if options.fast else (LENGTHS, TRAINED_LENGTH, TRAINING_STEPS)
    )
    results: dict[str, Any] = {"machine": facts(), "backward": {}}
    for each in lengths:
        results["backward"][str(each)] = backward(each)
        print(f"T = {each}:", {name: f"{one['ms']:.3g} ms" for name, one in results["backward"][str(each)].items()})
    ways = {name: train(solver, length, steps) for name, solver in TRAINED.items()}
    results["training"] = {"length": length, "steps": steps, "learning_rate": LEARNING_RATE, "ways": ways}
    print(table(results))
    folder = target(options, __file__)
    if folder is not None:
        write("bitstream", results, folder, table, plot)


if __name__ == "__main__":
    main()
