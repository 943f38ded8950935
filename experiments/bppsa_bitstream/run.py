"""An Elman network that tells bit streams apart, with gradients by torch, by the chunked adjoint and by scans.

    python -m experiments.bppsa_bitstream.run                    # about four minutes on one core
    python -m experiments.bppsa_bitstream.run --device cuda      # against cuDNN
    python -m experiments.bppsa_bitstream.run --protocol paper --minutes 60
    python -m experiments.bppsa_bitstream.run --protocol paper --epochs 5 --device cuda   # a sixteenth of it
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
    whole,
    write,
)  # fmt: skip
from timeloom.solvers import Solver

FULL: Results = {"lengths": (1000, 3000, 10000, 30000), "length": 1000, "steps": 1000, "turns": 3}
FAST: Results = {"lengths": (50, 130), "length": 60, "steps": 12, "turns": 1}
OURS: Results = {"sequences": None, "rate": 3e-3, "clip": 1.0}
"""New streams in every step, a rate that learns in minutes, gradients clipped."""
PAPERS: Results = {"sequences": 32_000, "epochs": 80, "rate": 1e-5, "clip": None}
"""32,000 streams, 80 epochs of them, Adam at 1e-5."""
MOST_KEPT = 2000
"""Losses that a result keeps of a way: of more steps, means."""
LAST = 20
"""Kept losses at the end whose mean is told."""
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
    accuracy = float((answers == classes).float().mean())
    return {"steps": len(losses), "first_losses": losses[:ALIKE], **thinned(losses, elapsed), "accuracy": accuracy}


def thinned(losses: list[float], elapsed: list[float]) -> Results:
    """Of many steps, means of as many losses in a row as leave few enough, and the time at the end of each."""
    every = -(-len(losses) // MOST_KEPT)
    parts = [losses[i : i + every] for i in range(0, len(losses), every)]
    ends = [min(i + every, len(losses)) - 1 for i in range(0, len(losses), every)]
    return {
        "every": every,
        "losses": [round(sum(part) / len(part), 6) for part in parts],
        "elapsed": [elapsed[end] for end in ends],
    }


def table(results: dict[str, Any]) -> str:
    """Both parts in words."""
    lines = [f"Generated bit streams, {made_on(results['machine'])}. Milliseconds of the backward pass:", ""]
    lines += [f"| T | {' | '.join(SOLVERS)} | largest difference |", "| --: " * (len(SOLVERS) + 2) + "|"]
    for steps, found in results["backward"].items():
        worst = max(one["difference"] for one in found.values())
        times = " | ".join(f"{one['ms']:.3g} ms" for one in found.values())
        lines.append(f"| {steps} | {times} | {worst:.1e} |")
    about = results["training"]
    streams = "new streams in every step"
    if about.get("sequences"):
        streams = f"{about.get('epochs', 'some')} epochs of {about['sequences']:,} streams"
    last = LAST * max(one.get("every", 1) for one in about["ways"].values())
    lines += [
        "",
        f"Training at T = {about['length']}, at most {about['steps']:,} steps of batch {BATCH}, Adam at "
        f"{about['rate']:g}, {streams} (losses compared over the first {min(ALIKE, about['steps'])}):", "",
        f"| way | time (steps) | a step over torch | last loss (mean of {last}) | accuracy | losses differ from "
        "torch's by |",
        "| --- | --: | --: | --: | --: | --: |",
    ]  # fmt: skip
    base = about["ways"]["torch"]
    for name, one in about["ways"].items():
        first, theirs = (run.get("first_losses", run["losses"])[:ALIKE] for run in (one, base))
        apart = max(abs(a - b) for a, b in zip(first, theirs, strict=False))
        mean = sum(one["losses"][-LAST:]) / len(one["losses"][-LAST:])
        lines.append(
            f"| {name} | {one['elapsed'][-1]:.1f} s ({steps_of(one):,}) | {seconds(base) / seconds(one):.1f}× | "
            f"{mean:.3f} | "
            f"{one['accuracy']:.1%} | {apart:.1e} |"
        )
    return "\n".join(lines) + "\n"


def steps_of(run: Results) -> int:
    return run.get("steps", len(run["losses"]))


def seconds(run: Results) -> float:
    """Of a step, the mean."""
    return run["elapsed"][-1] / steps_of(run)


def plot(results: dict[str, Any], path: Path) -> None:
    """Losses over steps and over time."""
    about = results["training"]
    plot_losses(about["ways"], f"generated bit streams, T = {about['length']}", path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--protocol", choices=("ours", "paper"), default="ours", help="of the training (default: ours)")
    parser.add_argument("--epochs", type=whole, help="of the paper's protocol (default: its 80)")
    options = begin(parser, arguments)
    if options.epochs and options.protocol != "paper":
        parser.error("--epochs: only with --protocol paper; else every step has new streams")
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
    if options.protocol == "paper":
        how |= PAPERS | ({"sequences": 4 * BATCH, "epochs": 2} if options.fast else {})
        how["epochs"] = options.epochs or how["epochs"]
        how["steps"] = how["epochs"] * how["sequences"] // BATCH
    else:
        how |= OURS
    ways = {}
    for number, (name, solver) in enumerate(TRAINED.items()):
        ways[name] = train(solver, {**how, "ways_left": len(TRAINED) - number}, device, clock)
    results["training"] = {**how, "ways": ways}
    print(table(results))
    base = "bitstream" if device == "cpu" else f"bitstream_{device}"
    write(base + ("_paper" if options.protocol == "paper" else ""), results, folder_of(options, __file__), table, plot)


if __name__ == "__main__":
    main()
