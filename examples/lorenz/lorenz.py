"""Learn the Lorenz system from one long run of it, parallel in time: a chaotic recurrence trained by teacher forcing.

Over 12,288 steps the gradients of a chaotic cell explode, and its states cannot be solved for in parallel. Drawn to the
data a little before every step (`timeloom.TeacherForcing`), it contracts: both work, at any length. The force is
annealed, so that at the end the cell has to find its own way. What counts is the free system afterwards: its largest
Lyapunov exponent beside that of the true one.

    python examples/lorenz/lorenz.py --out lorenz
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.forcing import annealed, contracting_alpha

DT = 0.01
"""Time between two samples."""


class Cell(nn.Module):
    """`h⁺ = h + V tanh(W h + b) + c`: it is told nothing of the equations, and has no inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, width), nn.Linear(width, 3)
        nn.init.normal_(self.outer.weight, std=1e-3)
        nn.init.zeros_(self.outer.bias)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + self.outer(torch.tanh(self.inner(h)))


def true_step(y: Tensor, x: Tensor | None = None) -> Tensor:
    """One Runge–Kutta step of the Lorenz system, `(N, 3)`."""

    def field(y: Tensor) -> Tensor:
        a, b, c = y.unbind(-1)
        return torch.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c], -1)

    k1 = field(y)
    k2 = field(y + DT / 2 * k1)
    k3 = field(y + DT / 2 * k2)
    return y + DT / 6 * (k1 + 2 * k2 + 2 * k3 + field(y + DT * k3))


def free_run(step, y: Tensor, steps: int, settle: int = 0) -> Tensor:
    """States `(steps, B, 3)` of a system left to itself."""
    states = []
    with torch.no_grad():
        for number in range(settle + steps):
            y = step(y, y[:, :0])
            if number >= settle:
                states.append(y)
    return torch.stack(states)


def training_step(forced: tl.TeacherForcing, data: Tensor, solver: str) -> tuple[Tensor, tl.SolveReport, float]:
    begin = perf_counter()
    guess = None if solver == "sequential" else data[1:]  # the data are where the states are to be
    states, report = tl.unroll(forced, data[0], forced.inputs(data[:-1]), solver=solver, guess=guess)
    loss = (states - data[1:]).square().mean()
    forced.zero_grad()
    loss.backward()
    return float(loss.detach()), report, perf_counter() - begin


def gradient(forced: tl.TeacherForcing) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in forced.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=12_288, help="steps of the run that is learned")
    parser.add_argument("--batch", type=int, default=1, help="runs side by side")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--start", type=float, default=1.0, help="α of the first update")
    parser.add_argument("--end", type=float, default=0.05, help="α of the last one")
    parser.add_argument("--solver", default="deer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--out", type=Path, help="folder for results.json and the picture")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    begins = torch.randn(options.batch, 3, dtype=torch.float64) + torch.tensor([0.0, 0.0, 25.0])
    true = free_run(true_step, begins, options.length + 1, settle=1000)
    mean, scale = true.flatten(0, 1).mean(0), true.flatten(0, 1).std(0)
    data = ((true - mean) / scale).float().to(options.device)
    cell = Cell(options.width).to(options.device)
    forced = tl.TeacherForcing(cell, annealed(options.start, options.end, options.updates)).to(options.device)
    optimiser = torch.optim.Adam(cell.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.updates, 1e-5)
    for number in range(options.updates):
        loss, report, seconds = training_step(forced, data, options.solver)
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimiser.step()
        rate.step()
        forced.advance()
        if (number + 1) % max(1, options.updates // 10) == 0:
            print(f"update {number + 1}: squared error {loss:.2e}, α {float(forced.alpha):.3f}, {seconds:.2f} s")
            print(f"  {report}", flush=True)
    results: dict[str, float] = {"length": options.length, "squared_error": loss}
    results["least_alpha"] = contracting_alpha(cell, data[: min(options.length, 2000)])
    grads = {}
    for solver in (options.solver, "sequential"):  # side by side: the same update, the same gradient
        seconds = min(training_step(forced, data, solver)[2] for _ in range(3))
        results[f"seconds_{solver}"], grads[solver] = seconds, gradient(forced)
    difference = (grads[options.solver] - grads["sequential"]).norm() / grads["sequential"].norm()
    free = tl.TeacherForcing(cell, 0.0).to(options.device)
    training_step(free, data[:2001], "sequential")
    results |= {"gradient_difference": float(difference), "norm_forced": float(grads["sequential"].norm())}
    results["norm_free_2000_steps"] = float(gradient(free).norm())
    steps = min(options.length, 10_000)
    nothing = torch.empty(steps, options.batch, 0, device=options.device)
    own = tl.lyapunov_exponents(cell, data[0], nothing, count=1, discard=steps // 20).mean() / DT
    exact = tl.lyapunov_exponents(true_step, true[0], nothing.double().cpu(), count=1, discard=steps // 20).mean() / DT
    results |= {"lyapunov_learned": float(own), "lyapunov_true": float(exact)}
    fast, slow = (results[f"seconds_{solver}"] for solver in (options.solver, "sequential"))
    print(f"one update over {options.length} steps: {fast:.3f} s by {options.solver}, {slow:.3f} s by the loop")
    print("gradients: " + ", ".join(f"{key} {results[key]:.1e}" for key in results if "norm" in key or "diff" in key))
    print(f"largest Lyapunov exponent: learned {own:.3f}, true {exact:.3f} (1 / time)")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
        learned = free_run(cell, data[0], 5000).cpu() * scale + mean
        draw(true[:5000, 0], learned[:, 0], float(exact), float(own), options.out / "lorenz.png")


def draw(true: Tensor, learned: Tensor, exact: float, own: float, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharex=True, sharey=True)
    for axis, run, title in ((axes[0], true, f"true: λ = {exact:.2f}"), (axes[1], learned, f"learned: λ = {own:.2f}")):
        axis.plot(run[:, 0], run[:, 2], linewidth=0.4)
        axis.set(title=title, xlabel="x", ylabel="z")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
