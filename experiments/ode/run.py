"""Neural ODEs over 10,000 steps: `odeint` against a loop of Runge–Kutta steps, time beside error.

    python experiments/ode/run.py      # about five minutes; writes results.json and results.md beside this file

The loop is what users write: one step after the other in torch, differentiated by autograd. Both sides run in turn in
one process; times are those of its one thread, so that other work on the machine does not count. Errors are the
largest of all points and gradients against a float64 loop with twice as many steps, relative to the largest value.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import timeloom as tl

HERE = Path(__file__).parent
STEPS = 10_000
ROUNDS = 3
FINER = 2

Field = Callable[[Tensor, Tensor], Tensor]


class Network(nn.Module):
    """A neural ODE of 4 units with 32 hidden ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


class TwoBodies(nn.Module):
    """Two masses that attract each other; y holds places and velocities, `(N, 8)`."""

    def __init__(self) -> None:
        super().__init__()
        self.masses = nn.Parameter(torch.ones(2))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        apart = y[:, 2:4] - y[:, :2]
        pull = apart / apart.norm(dim=-1, keepdim=True) ** 3
        return torch.cat([y[:, 4:], self.masses[1] * pull, -self.masses[0] * pull], -1)


class Oscillator(nn.Module):
    """Van der Pol's."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.ones(1))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        place, speed = y.unbind(-1)
        return torch.stack([speed, self.strength * (1 - place * place) * speed - place], -1)


PROBLEMS: dict[str, tuple[type[nn.Module], list[float], float]] = {
    "network, n=4": (Network, [1.0, -0.5, 0.3, 0.8], 10.0),
    "two bodies, n=8": (TwoBodies, [1.0, 0, -1.0, 0, 0, 0.45, 0, -0.45], 20.0),
    "van der Pol, n=2": (Oscillator, [2.0, 0.0], 20.0),
}
"""Right-hand side, first point, last time."""


def loop(f: Field, y: Tensor, t: Tensor) -> Tensor:
    """The Runge–Kutta steps one after the other."""
    points, times = [y], t.unbind(0)
    for begin, end in itertools.pairwise(times):
        h = end - begin
        k1 = f(begin, y)
        k2 = f(begin + h / 2, y + h / 2 * k1)
        k3 = f(begin + h / 2, y + h / 2 * k2)
        k4 = f(end, y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        points.append(y)
    return torch.stack(points)


def gradients(y: Tensor, y0: Tensor, f: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().mean(), [y0, *f.parameters()]))


def worst(given: list[Tensor], truth: list[Tensor]) -> float:
    pairs = zip(given, truth, strict=True)
    return max(float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)


def sides(t: Tensor) -> dict[str, Callable[[nn.Module, Tensor], Tensor]]:
    """The loop, and `odeint` by each step."""
    ways: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {"loop of rk4": lambda f, y0: loop(f, y0, t)}
    for step in ("rk4", "hermite-simpson", "implicit-midpoint", "deer"):
        ways[f"odeint, {step}"] = lambda f, y0, step=step: tl.odeint(f, y0, t, step=step)  # type: ignore[misc]
    return ways


def truth_of(name: str) -> tuple[nn.Module, Tensor, list[Tensor]]:
    """A problem in float64: right-hand side, first point, and the solution with its gradients."""
    build, first, last = PROBLEMS[name]
    torch.manual_seed(0)
    exact = build().double()
    y0 = torch.tensor([first], dtype=torch.float64, requires_grad=True)
    fine = loop(exact, y0, torch.linspace(0, last, FINER * STEPS + 1, dtype=torch.float64))[::FINER]
    return exact, y0, [fine.detach(), *gradients(fine, y0, exact)]


def measure(
    name: str, dtype: torch.dtype, exact: nn.Module, y0: Tensor, truth: list[Tensor]
) -> list[dict[str, object]]:
    build, _, last = PROBLEMS[name]
    f = build().to(dtype)
    f.load_state_dict(exact.state_dict())
    y0 = y0.detach().to(dtype).requires_grad_()
    ways = sides(torch.linspace(0, last, STEPS + 1, dtype=dtype))
    times: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    results: dict[str, list[Tensor]] = {}
    for _, (way, run) in itertools.product(range(ROUNDS), ways.items()):
        with torch.no_grad():
            run(f, y0)  # pays for what the side before has left in the allocator
            began = time.process_time()
            run(f, y0)
        middle = time.process_time()
        y = run(f, y0)
        results[way] = [y.detach(), *gradients(y, y0, f)]
        times[way][0].append(middle - began)
        times[way][1].append(time.process_time() - middle)
        del y
        gc.collect()
    rows: list[dict[str, object]] = []
    base = [min(side) for side in times["loop of rk4"]]
    for way, (forward, both) in times.items():
        fastest = min(forward), min(both)
        rows.append(
            {
                "problem": name,
                "dtype": str(dtype).removeprefix("torch."),
                "way": way,
                "forward_ms": round(1e3 * fastest[0], 1),
                "training_ms": round(1e3 * fastest[1], 1),
                "forward_ratio": round(base[0] / fastest[0], 1),
                "training_ratio": round(base[1] / fastest[1], 1),
                "error": worst(results[way][:1], truth[:1]),
                "gradient_error": worst(results[way][1:], truth[1:]),
            }
        )
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        f"# {STEPS:,} steps on one CPU thread",
        "",
        "Thread time, fastest of three; training is forward + backward; ratios are against the loop. Errors: see",
        "the top of run.py, which makes this table.",
        "",
        "| problem | dtype | | forward | training | faster: forward | training | error | of gradients |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['problem']} | {row['dtype']} | {row['way']} | {row['forward_ms']} ms | {row['training_ms']} ms | "
            f"{row['forward_ratio']}× | {row['training_ratio']}× | {row['error']:.0e} | {row['gradient_error']:.0e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name in PROBLEMS:
        truth = truth_of(name)
        for dtype in (torch.float64, torch.float32):
            rows += measure(name, dtype, *truth)
    (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "results.md").write_text(table(rows))


if __name__ == "__main__":
    main()
