"""Learn the energy of the two-body problem from orbits of 10,000 steps, all of them solved at once.

    python -m experiments.deer_two_body.run                                      # four orbits; ten minutes on one core
    python -m experiments.deer_two_body.run --size paper --device cuda --minutes 4   # 800 orbits, the whole H learned
    python -m experiments.deer_two_body.run --size paper --pieces --batch 32 --rate 0.005 --device cuda --minutes 4
    python -m experiments.deer_two_body.run --fast                               # all parts in small, seconds

The NeuralODE task of the DEER paper: a network H(q, p) is trained so that the orbits of its Hamilton equations are
those of two bodies that attract each other. The data are generated, as in the paper. Each training step solves a batch
of orbits by `timeloom.odeint`, from the last epoch's orbits on; some steps are repeated by a loop of Runge–Kutta steps
on autograd's tape, from the same weights, for time, loss and gradients side by side. Times are those of the clock:
other work on the machine counts.

`--pieces` is ours, to learn in minutes instead of the paper's day: each step takes pieces of its orbits that begin
anywhere and grow from a twentieth to a fifth of an orbit, the rate falls to zero, and weights are drawn so that layers
of softplus keep the scale of what they read. All of it follows the share of the training that is over, in steps or in
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import timeloom as tl
from experiments.deer_two_body.hamiltonian import Hamiltonian, attraction, orbits
from experiments.deer_two_body.report import draw, table
from experiments.harness import Clock, Results, begin, command, facts, folder_of, now, rate, whole, write
from experiments.ode.run import loop

SPAN, SHOWN = 10.0, 200
"""Time of an orbit; points of it that results keep."""
PIECES = (0.05, 0.2)
"""Shares of an orbit that a piece has, at first and at last."""
TOGETHER = 100
"""Orbits that are solved at once where nothing is learned."""
KEPT_TIME, CHECKS = 0.15, 0.05
"""Shares of the time: for what follows the training, and at most for its validation on the way."""
SIZES: dict[str, Results] = {
    "small": {
        "steps": 10_000,
        "orbits": [4, 4, 4],
        "batch": 4,
        "epochs": 60,
        "compared": 2,
        "compared_steps": 10_000,
        "rate": 1e-2,
        "width": 32,
        "layers": 2,
        "activation": "tanh",
        "kinetic": "given",
        "drawn": "nearly circular",
        "grow": 0,
        "pieces": False,
    },
    "paper": {
        "steps": 10_000,
        "orbits": [800, 100, 100],
        "batch": 16,
        "epochs": 20,
        "compared": 2,
        "compared_steps": 200,
        "rate": 1e-3,
        "width": 64,
        "layers": 6,
        "activation": "softplus",
        "kinetic": "learned",
        "drawn": "as in the paper",
        "grow": 0,
        "pieces": False,
    },
}
FAST: Results = {"steps": 60, "orbits": [2, 2, 2], "batch": 2, "epochs": 12, "width": 8}
"""In place of a size's own, the rest of which stays."""


def compare(model: Hamiltonian, first: Tensor, t: Tensor, truth: Tensor, steps: int, device: str) -> dict[str, float]:
    """One training step over the first `steps` by `odeint` and by the loop: seconds, losses and gradients of both."""
    t, truth = t[: steps + 1], truth[: steps + 1]
    found: dict[str, Any] = {}
    for name, solve in (("our", lambda: tl.odeint(model, first, t)), ("loop", lambda: loop(model, first, t))):
        model.zero_grad()
        began = now(device)
        loss = (solve() - truth).square().mean()
        loss.backward()
        found[f"{name}_seconds"] = now(device) - began
        found[name] = (loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
    (ours, mine), (theirs, exact) = found.pop("our"), found.pop("loop")
    pairs = [(a, b) for a, b in zip(mine, exact, strict=True) if float(b.abs().max()) > 0]
    found["loss_difference"] = abs(ours - theirs) / theirs
    found["gradient_difference"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return {"steps": steps, **found}


def train(sizes: Results, device: str, clock: Clock) -> Results:
    """Losses, times and Newton steps of every step, the comparisons, and the error on orbits never seen."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    t = torch.linspace(0, SPAN, sizes["steps"] + 1, device=device)
    first, valid, test = (orbits(count, generator, sizes["drawn"]).to(device) for count in sizes["orbits"])
    truth, checked = solved(attraction, first, t), solved(attraction, valid, t)
    model = Hamiltonian(*(sizes[key] for key in ("width", "layers", "activation", "kinetic")))
    if sizes["pieces"]:
        model.keep_scale()
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=sizes["rate"])
    results: Results = {
        "losses": [],
        "seconds": [],
        "newton_steps": [],
        "cold_newton_steps": [],
        "validation_by_step": [],
        "compared": [],
    }
    guesses: dict[int, Tensor] = {}
    batches = list(range(0, len(first), sizes["batch"]))
    total, reports = sizes["epochs"] * len(batches), list[tl.SolveReport]()
    compared_at = {round(i * (total - 1) / max(sizes["compared"] - 1, 1)) for i in range(sizes["compared"])}
    number, checking, share = 0, 0.0, _over(clock, total)
    for epoch in range(sizes["epochs"]):
        shown = min(sizes["grow"] * (epoch + 1) or sizes["steps"], sizes["steps"]) + 1  # points of an orbit
        for begin_at in batches:
            rows, over = slice(begin_at, begin_at + sizes["batch"]), clock.over or share(number) >= 1
            if number in compared_at or (over and len(results["compared"]) < sizes["compared"]):
                beside = compare(model, first[rows], t, truth[:, rows], sizes["compared_steps"], device)
                results["compared"].append({"step": number, **beside})
            if over and results["losses"]:  # a time limit leaves at least one step
                break
            begins, target = first[rows], truth[:shown, rows]
            if sizes["pieces"]:
                shown = piece_of(share(number), sizes["steps"])
                begins, target = pieces(truth[:, rows], shown, generator)
                optimizer.param_groups[0]["lr"] = sizes["rate"] * (1 + math.cos(math.pi * share(number))) / 2
            began = now(device)
            guess = longer(guesses[begin_at], shown) if begin_at in guesses else None
            orbit = tl.odeint(model, begins, t[:shown], guess=guess, record=reports.append)
            loss = (orbit - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results["seconds"].append(round(now(device) - began, 4))
            results["losses"].append(loss.item())
            results["newton_steps" if begin_at in guesses else "cold_newton_steps"].append(reports[-1].iterations)
            if not sizes["pieces"]:
                guesses[begin_at] = orbit.detach()
            number += 1
        began = clock.seconds
        if not epoch or checking < CHECKS * began:
            results["validation_by_step"].append([number, errors(model, checked, t)["error"]])
            checking += clock.seconds - began
        print(
            f"epoch {epoch:3d}  loss {results['losses'][-1]:.2e}  ({results['seconds'][-1]:.2f} s a step)", flush=True
        )
        if over:
            break
    results["validation"] = errors(model, solved(attraction, test, t), t)
    return results


def _over(clock: Clock, total: int) -> Callable[[int], float]:
    """From the number of a step, the share of the training that is over, in steps or in the time that it has."""
    began, limit = clock.seconds, (1 - KEPT_TIME) * (clock.limit or math.inf)
    return lambda number: max(number / total, (clock.seconds - began) / max(limit - began, 1e-9))


def piece_of(share: float, steps: int) -> int:
    """Points of a piece when that share of the training is over: more and more, by the same factor."""
    least, most = PIECES
    return max(round(steps * least * (most / least) ** min(share, 1)), 1) + 1


def pieces(truth: Tensor, points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """First points `(N, 8)` and all `(points, N, 8)` of a piece of every orbit `(T, N, 8)`, each from anywhere on."""
    begins = torch.randint(len(truth) - points + 1, (truth.shape[1],), generator=generator).to(truth.device)
    at = begins + torch.arange(points, device=truth.device)[:, None]
    target = truth.gather(0, at[..., None].expand(-1, -1, truth.shape[2]))
    return target[0], target


@torch.no_grad()
def solved(f: Callable[[Tensor, Tensor], Tensor], first: Tensor, t: Tensor) -> Tensor:
    """Whole orbits `(T, N, 8)`."""
    return torch.cat([tl.odeint(f, part, t) for part in first.split(TOGETHER)], 1)


def longer(orbit: Tensor, points: int) -> Tensor:
    """An orbit `(T, N, 8)` that stands still from its end on, up to so many points."""
    return torch.cat([orbit, orbit[-1:].expand(points - len(orbit), -1, -1)])


@torch.no_grad()
def errors(model: Hamiltonian, truth: Tensor, t: Tensor) -> Results:
    """Mean squared error on orbits never seen, by time too, beside that of bodies that stand still; and one orbit."""
    fresh = truth[0]
    learned = solved(model, fresh, t)
    every = max(1, (len(t) - 1) // SHOWN)
    by_time = (learned - truth).square().mean((1, 2))[::every]
    return {
        "error": (learned - truth).square().mean().item(),
        "standing_still": (fresh - truth).square().mean().item(),
        "times": [round(value, 4) for value in t[::every].tolist()],
        "by_time": [float(f"{value:.4g}") for value in by_time.tolist()],
        "orbit": {
            name: [[round(v, 4) for v in path[::every, 0, k].tolist()] for k in range(4)]
            for name, path in (("learned", learned), ("true", truth))
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument(
        "--size", choices=("small", "paper"), default="small", help="orbits and network (default: small)"
    )
    parser.add_argument("--orbits", type=whole, nargs=3, help="to train, to validate and to test on")
    parser.add_argument("--batch", type=whole, help="orbits of a training step")
    parser.add_argument("--epochs", type=whole)
    parser.add_argument("--steps", type=whole, help="of an orbit (default: 10000)")
    parser.add_argument("--kinetic", choices=("given", "learned"), help="energy of motion")
    parser.add_argument(
        "--grow",
        type=whole,
        help="time steps that every epoch adds, as the paper's code does with 20 (default: all from the first on)",
    )
    parser.add_argument(
        "--pieces", action="store_true", help="train on pieces that begin anywhere, as the top of this text says"
    )
    parser.add_argument("--rate", type=rate, help="learning rate of Adam (default: 1e-2 of the small size, 1e-3)")
    options = begin(parser, arguments)
    if options.pieces and options.grow:
        parser.error("--pieces --grow: pieces grow by themselves; leave one of the two out")
    sizes = SIZES[options.size] | (FAST if options.fast else {})
    for name in ("orbits", "batch", "epochs", "steps", "kinetic", "grow", "pieces", "rate"):
        sizes[name] = getattr(options, name) or sizes[name]
    sizes["compared_steps"] = min(sizes["compared_steps"], sizes["steps"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        results = {
            "machine": facts(options.device),
            "sizes": sizes,
            "found": train(sizes, options.device, options.clock),
        }
    finally:
        torch.set_default_dtype(before)
    print(table(results))
    base = (
        "two_body"
        + ("" if options.size == "small" else "_paper")
        + ("" if options.device == "cpu" else f"_{options.device}")
    )
    write(base, results, folder_of(options, __file__), table, draw)


if __name__ == "__main__":
    main()
