"""Learn the energy of the two-body problem from orbits of 10,000 steps, all of them solved at once.

    python -m experiments.deer_two_body.run              # about ten minutes on one core
    python -m experiments.deer_two_body.run --fast       # all parts in small, seconds

The NeuralODE task of the DEER paper: a network H(q, p) is trained so that the orbits of its Hamilton equations are
those of two bodies that attract each other. The data are generated, as in the paper. Each training step solves all
orbits by `timeloom.odeint`, from the last epoch's orbits on; some steps are repeated by a loop of Runge–Kutta steps on
autograd's tape, from the same weights, for time, loss and gradients side by side. Times are those of the process: other
work on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from experiments.deer_two_body.hamiltonian import Hamiltonian, attraction, orbits
from experiments.ode.run import loop
from experiments.harness import command, facts, target, write

SPAN, LEARNING_RATE = 10.0, 1e-2
FULL = {"steps": 10_000, "orbits": 4, "epochs": 60, "width": 32, "compared": 2}
FAST = {"steps": 60, "orbits": 2, "epochs": 12, "width": 8, "compared": 2}


def compare(model: Hamiltonian, first: Tensor, t: Tensor, truth: Tensor, ours: float) -> dict[str, float]:
    """The same training step by the loop: its seconds, and how far its loss and gradients are from the ones given.

    ours: the loss by `odeint`, whose gradients the parameters hold.
    """
    used = [p for p in model.parameters() if p.grad is not None and p.grad.abs().max() > 0]
    began = time.process_time()
    loss = (loop(model, first, t) - truth).square().mean()
    theirs = torch.autograd.grad(loss, used)
    taken = time.process_time() - began
    apart = [float((p.grad - b).abs().max() / b.abs().max()) for p, b in zip(used, theirs, strict=True)]
    return {
        "loop_seconds": taken,
        "loss_difference": abs(ours - loss.item()) / loss.item(),
        "gradient_difference": max(apart),
    }


def train(sizes: dict[str, int]) -> dict[str, Any]:
    """Losses, times and Newton steps of every epoch, the comparisons, and the error on orbits never seen."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    t = torch.linspace(0, SPAN, sizes["steps"] + 1)
    first, fresh = orbits(sizes["orbits"], generator), orbits(sizes["orbits"], generator)
    truth, fresh_truth = (tl.odeint(attraction, start, t).detach() for start in (first, fresh))
    model = Hamiltonian(sizes["width"])
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    reports: list[tl.SolveReport] = []
    compared_at = {round(i * (sizes["epochs"] - 1) / max(sizes["compared"] - 1, 1)) for i in range(sizes["compared"])}
    results: dict[str, Any] = {"losses": [], "seconds": [], "newton_steps": [], "compared": []}
    guess = None
    for epoch in range(sizes["epochs"]):
        began = time.process_time()
        orbit = tl.odeint(model, first, t, guess=guess, record=reports.append)
        loss = (orbit - truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        taken = time.process_time() - began
        if epoch in compared_at:
            beside = compare(model, first, t, truth, loss.item())
            results["compared"].append({"epoch": epoch, "our_seconds": taken, **beside})
        optimizer.step()
        guess = orbit.detach()
        results["losses"].append(loss.item())
        results["seconds"].append(round(taken, 4))
        results["newton_steps"].append(reports[-1].iterations)
        if epoch % 10 == 0 or epoch == sizes["epochs"] - 1:
            print(f"epoch {epoch:3d}  loss {loss.item():.2e}  ({taken:.2f} s, {reports[-1].iterations} Newton steps)")
    results["validation"] = validate(model, fresh, fresh_truth, t)
    return results


@torch.no_grad()
def validate(model: nn.Module, fresh: Tensor, truth: Tensor, t: Tensor) -> dict[str, float]:
    """Mean squared error on orbits never seen; that of bodies that stand still, to compare with."""
    learned = tl.odeint(model, fresh, t)
    return {"error": (learned - truth).square().mean().item(), "standing_still": (fresh - truth).square().mean().item()}


def table(results: dict[str, Any]) -> str:
    """The result in words."""
    sizes, found = results["sizes"], results["found"]
    lines = [
        f"{sizes['orbits']} generated orbits of {sizes['steps']:,} steps, {sizes['epochs']} epochs, float64, "
        f"{results['machine']['threads']} thread(s), its processor time.",
        "",
        "| epoch | odeint | loop of Runge–Kutta steps | ratio | difference of losses | of gradients |",
        "| --: | --: | --: | --: | --: | --: |",
    ]
    for one in found["compared"]:
        lines.append(
            f"| {one['epoch']} | {one['our_seconds']:.2f} s | {one['loop_seconds']:.1f} s | "
            f"{one['loop_seconds'] / one['our_seconds']:.0f}× | {one['loss_difference']:.0e} | "
            f"{one['gradient_difference']:.0e} |"
        )
    lines += [
        "",
        f"Loss {found['losses'][0]:.2e} at first, {found['losses'][-1]:.2e} at last; on orbits never seen "
        f"{found['validation']['error']:.2e} (standing still: {found['validation']['standing_still']:.2e}). All epochs "
        f"took {sum(found['seconds']):.0f} s, {max(found['newton_steps'])} Newton steps at most.",
    ]
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Loss over epochs, and the time of an epoch."""
    from matplotlib.figure import Figure

    found = results["found"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(found["losses"])
    left.set(
        xlabel="epoch",
        ylabel="mean squared error",
        yscale="log",
        title=f"generated orbits of {results['sizes']['steps']:,} steps",
    )
    right.plot(found["seconds"], label="odeint, all steps at once")
    compared = found["compared"]
    right.plot([c["epoch"] for c in compared], [c["loop_seconds"] for c in compared], "o", label="loop of steps")
    right.set(xlabel="epoch", ylabel="seconds, forward + backward", yscale="log", title="time of a training step")
    right.legend()
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    options = command(__doc__).parse_args(arguments)
    sizes = FAST if options.fast else FULL
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        results = {"machine": facts(), "sizes": sizes, "found": train(sizes)}
    finally:
        torch.set_default_dtype(before)
    print(table(results))
    folder = target(options, __file__)
    if folder is not None:
        write("two_body", results, folder, table, plot)


if __name__ == "__main__":
    main()
