"""An Elman network that tells bit streams apart, with gradients by torch, by the chunked adjoint and by scans.

    python -m experiments.bppsa_bitstream.run                    # about four minutes on one core
    python -m experiments.bppsa_bitstream.run --device cuda      # against cuDNN
    python -m experiments.bppsa_bitstream.run --protocol paper --minutes 60
    python -m experiments.bppsa_bitstream.run --fast             # all parts in small, seconds

The first recurrent task of the BPPSA paper, whose data are generated there too: class c of ten draws its bits with
probability 0.05 + 0.1 c, an RNN of 20 tanh units reads them, batch 16, and its last state tells the class. Measured are
the backward pass alone by length, how far its gradients are from torch's, and a training by each of three ways, by the
clock, the fastest of some turns: other work on the machine counts. `experiments.bppsa_bitstream.grid` has more batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from experiments.bppsa_bitstream.streams import BATCH, SOLVERS, TRAINED, Classifier, bits, models
from experiments.harness import (
    Clock,
    Results,
    begin,
    command,
    facts,
    folder_of,
    in_turns,
    made_on,
    now,
    passes,
    plot_losses,
    write,
)  # fmt: skip
from timeloom.solvers import Solver

FULL: Results = {"lengths": (1000, 3000, 10000, 30000), "length": 1000, "steps": 1000, "turns": 3}
FAST: Results = {"lengths": (50, 130), "length": 60, "steps": 12, "turns": 1}
OURS: Results = {"sequences": None, "rate": 3e-3, "clip": 1.0}
"""New streams in every step, a rate that learns in minutes, gradients clipped."""
PAPERS: Results = {"sequences": 32_000, "rate": 1e-5, "clip": None, "steps": 80 * 32_000 // BATCH}
"""32,000 streams, 80 epochs of them, Adam at 1e-5."""
ALIKE = 100
"""Training steps over which losses are compared: later, gradients explode now and then, and rounding with them."""


def backward(steps: int, turns: int, device: str, clock: Clock) -> dict[str, dict[str, float]]:
    """By way, milliseconds of the fastest of a few backward passes, and the largest difference from torch's."""
    x, classes = bits(steps, BATCH, 0, device)
    made = models(SOLVERS, device)
    calls = {
        name: lambda model=model: passes(lambda: cross_entropy(model(x), classes), device)
        for name, model in made.items()
    }
    taken = in_turns(calls, turns, clock)
    found: dict[str, dict[str, float]] = {}
    for name, model in made.items():
        model.zero_grad()
        cross_entropy(model(x), classes).backward()
        pairs = zip(model.rnn.parameters(), made["torch"].rnn.parameters(), strict=True)
        apart = max(float((mine.grad - true.grad).abs().max() / true.grad.abs().max()) for mine, true in pairs)
        found[name] = {"ms": min(pair[1] for pair in taken[name]), "difference": apart}
    return found


def train(solver: Solver | None, how: Results, device: str, clock: Clock) -> dict[str, Any]:
    """Losses, the seconds until each of them, and the accuracy on new streams."""
    torch.manual_seed(0)
    model = Classifier(solver).to(device)
    optimizer = torch.optim.Adam(model.parameters(), how["rate"])
    losses, elapsed, seconds = list[float](), list[float](), 0.0
    again = how["sequences"] // BATCH if how["sequences"] else how["steps"]
    share = clock.seconds + clock.left / how["ways_left"]
    for step in range(how["steps"]):
        x, classes = bits(how["length"], BATCH, 1 + step % again, device)
        began = now(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), classes)
        loss.backward()
        if how["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
        optimizer.step()
        seconds += now(device) - began
        losses.append(round(loss.item(), 6))
        elapsed.append(round(seconds, 4))
        if clock.seconds > share:
            break
    x, classes = bits(how["length"], 40 * BATCH, 0, device)
    with torch.no_grad():
        answers = model(x).argmax(-1)
    return {"losses": losses, "elapsed": elapsed, "accuracy": float((answers == classes).float().mean())}


def table(results: dict[str, Any]) -> str:
    """Both parts in words."""
    lines = [f"Generated bit streams, {made_on(results['machine'])}. Milliseconds of the backward pass:", ""]
    lines += [f"| T | {' | '.join(SOLVERS)} | largest difference |", "| --: " * (len(SOLVERS) + 2) + "|"]
    for steps, found in results["backward"].items():
        worst = max(one["difference"] for one in found.values())
        times = " | ".join(f"{one['ms']:.3g} ms" for one in found.values())
        lines.append(f"| {steps} | {times} | {worst:.1e} |")
    about = results["training"]
    lines += [
        "",
        f"Training at T = {about['length']}, at most {about['steps']} steps of batch {BATCH}, Adam at "
        f"{about['rate']:g}, "
        + (f"{about['sequences']} streams again and again" if about.get("sequences") else "new streams in every step")
        + f" (losses compared over the first {min(ALIKE, about['steps'])}):", "",
        "| way | time (steps) | a step over torch | last loss (mean of 20) | accuracy | losses differ from torch's "
        "by |",
        "| --- | --: | --: | --: | --: | --: |",
    ]  # fmt: skip
    base = about["ways"]["torch"]
    for name, one in about["ways"].items():
        apart = max(abs(a - b) for a, b in zip(one["losses"][:ALIKE], base["losses"][:ALIKE], strict=False))
        last = sum(one["losses"][-20:]) / len(one["losses"][-20:])
        lines.append(
            f"| {name} | {one['elapsed'][-1]:.1f} s ({len(one['losses'])}) | {_step(base) / _step(one):.1f}× | "
            f"{last:.3f} | "
            f"{one['accuracy']:.1%} | {apart:.1e} |"
        )
    return "\n".join(lines) + "\n"


def _step(run: Results) -> float:
    return run["elapsed"][-1] / len(run["elapsed"])


def plot(results: dict[str, Any], path: Path) -> None:
    """Losses over steps and over time."""
    about = results["training"]
    plot_losses(about["ways"], f"generated bit streams, T = {about['length']}", path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--protocol", choices=("ours", "paper"), default="ours", help="of the training (default: ours)")
    options = begin(parser, arguments)
    sizes = FAST if options.fast else FULL
    device, clock = options.device, options.clock
    results: dict[str, Any] = {"machine": facts(device), "backward": {}}
    for each in sizes["lengths"]:
        results["backward"][str(each)] = backward(each, sizes["turns"], device, clock)
        print(
            f"T = {each}:",
            {name: f"{one['ms']:.3g} ms" for name, one in results["backward"][str(each)].items()},
            flush=True,
        )
    how: Results = {"protocol": options.protocol, **{key: sizes[key] for key in ("length", "steps")}}
    how |= PAPERS if options.protocol == "paper" else OURS
    ways = {}
    for number, (name, solver) in enumerate(TRAINED.items()):
        ways[name] = train(solver, {**how, "ways_left": len(TRAINED) - number}, device, clock)
    results["training"] = {**how, "ways": ways}
    print(table(results))
    base = "bitstream" if device == "cpu" else f"bitstream_{device}"
    write(base + ("_paper" if options.protocol == "paper" else ""), results, folder_of(options, __file__), table, plot)


if __name__ == "__main__":
    main()
