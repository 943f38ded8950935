"""Neural ODEs over 10,000 steps: `odeint` against a loop of Runge–Kutta steps, time beside error.

    python -m experiments.ode.run                    # about five minutes on one core
    python -m experiments.ode.run --device cuda
    python -m experiments.ode.run --device cuda --resume   # the problems that the folder does not have yet

The loop is what users write: one step after the other in torch, differentiated by autograd. Both sides run in turn in
one process, and times are those of the clock. Errors are the largest of all points and gradients against a float64
loop with twice as many steps, relative to the largest value.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import timeloom as tl
from experiments.harness import (
    COLOURS,
    Results,
    begin,
    command,
    earlier_runs,
    facts,
    figure,
    folder_of,
    kept,
    made_on,
    markdown,
    now,
    save,
    write,
)

STEPS = 10_000
ROUNDS = 3
LONG = 5.0
"""Seconds of a training step from which a side is timed once, without a run to warm up: what that adds is a part of a
percent there."""
FINER = 2
LOOP = "loop of rk4"
DTYPES = (torch.float64, torch.float32)

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
    for first, last in itertools.pairwise(times):
        h = last - first
        k1 = f(first, y)
        k2 = f(first + h / 2, y + h / 2 * k1)
        k3 = f(first + h / 2, y + h / 2 * k2)
        k4 = f(last, y + h * k3)
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
    ways: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {LOOP: lambda f, y0: loop(f, y0, t)}
    for step in ("rk4", "hermite-simpson", "implicit-midpoint", "deer"):
        ways[f"odeint, {step}"] = lambda f, y0, step=step: tl.odeint(f, y0, t, step=step)  # type: ignore[misc]
    return ways


def truth_of(name: str, steps: int, device: str) -> tuple[nn.Module, Tensor, list[Tensor]]:
    """A problem in float64: right-hand side, first point, and the solution with its gradients.

    They are found on a CPU, whose steps this small take a fraction of a GPU's time.
    """
    build, first, last = PROBLEMS[name]
    torch.manual_seed(0)
    exact = build().double()
    last = last if steps == STEPS else 1.0
    y0 = torch.tensor([first], dtype=torch.float64, requires_grad=True)
    fine = loop(exact, y0, torch.linspace(0, last, FINER * steps + 1, dtype=torch.float64))[::FINER]
    truth = [part.to(device) for part in (fine.detach(), *gradients(fine, y0, exact))]
    return exact, y0, truth


def measure(
    name: str,
    dtype: torch.dtype,
    exact: nn.Module,
    y0: Tensor,
    truth: list[Tensor],
    *,
    steps: int,
    rounds: int,
    device: str,
) -> list[Results]:
    build, _, last = PROBLEMS[name]
    last = last if steps == STEPS else 1.0
    f = build().to(device, dtype)
    f.load_state_dict(exact.state_dict())
    y0 = y0.detach().to(device, dtype).requires_grad_()
    ways = sides(torch.linspace(0, last, steps + 1, dtype=dtype, device=device))
    times: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    results: dict[str, list[Tensor]] = {}
    for number, (way, run) in itertools.product(range(rounds), ways.items()):
        if number and times[way][1][0] > LONG:
            continue
        with torch.no_grad():
            if number or way != LOOP:
                run(f, y0)  # pays for what the side before has left in the allocator
            began = now(device)
            run(f, y0)
        middle = now(device)
        y = run(f, y0)
        results[way] = [y.detach(), *gradients(y, y0, f)]
        times[way][0].append(middle - began)
        times[way][1].append(now(device) - middle)
        del y
        gc.collect()
    rows: list[Results] = []
    base = [min(side) for side in times[LOOP]]
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


def table(results: Results) -> str:
    lines = [
        f"# {results['steps']:,} steps of neural ODEs",
        "",
        f"{made_on(results['machine'])}.{earlier_runs(results)} Fastest of {results['rounds']}, or of one that took "
        f"{LONG:g} s; training",
        "is forward + backward; ratios are against the loop. Errors: see the top of run.py, which makes this table.",
        "",
    ]
    cells = [
        [row["problem"], row["dtype"], row["way"], f"{row['forward_ms']} ms", f"{row['training_ms']} ms",
         f"{row['forward_ratio']}×", f"{row['training_ratio']}×", f"{row['error']:.0e}", f"{row['gradient_error']:.0e}"]
        for row in results["rows"]
    ]  # fmt: skip
    head = ["problem", "dtype", "", "forward", "training", "faster: forward", "training", "error", "of gradients"]
    return "\n".join([*lines, *markdown(head, cells, 3)]) + "\n"


def draw(results: Results, path: Path) -> None:
    drawn, axes = figure(9, 3.6)
    dtype = "float32" if any(row["dtype"] == "float32" for row in results["rows"]) else "float64"
    rows = [row for row in results["rows"] if row["way"] != LOOP and row["dtype"] == dtype]
    for colour, way in zip(COLOURS, dict.fromkeys(row["way"] for row in rows), strict=False):
        here = [row for row in rows if row["way"] == way]
        axes[0][0].semilogy(
            [row["problem"] for row in here], [row["training_ratio"] for row in here], "o", color=colour, label=way
        )
    axes[0][0].axhline(1.0, color="grey", linewidth=0.6)
    about = f"{results['steps']:,} steps, {dtype}, forward + backward; {made_on(results['machine'])}"
    axes[0][0].set(ylabel="times as fast as a loop of rk4", title=about)
    axes[0][0].title.set_fontsize(8)
    axes[0][0].margins(x=0.15)
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    drawn.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--resume", action="store_true", help="keep the rows that the folder already has")
    options = begin(parser, arguments)
    sizes = dict(zip(("steps", "rounds"), (20, 1) if options.fast else (STEPS, ROUNDS), strict=True))
    steps, rounds = sizes["steps"], sizes["rounds"]
    found: Results = {"machine": facts(options.device), **sizes, "rows": []}
    folder = folder_of(options, __file__)
    stored = "ode" if options.device == "cpu" else f"ode_{options.device}"
    if options.resume:
        found |= kept(folder / f"{stored}.json", sizes=sizes)
    done = {(row["problem"], row["dtype"]) for row in found["rows"]}
    for name in PROBLEMS:
        wanted = [dtype for dtype in DTYPES if (name, str(dtype).removeprefix("torch.")) not in done]
        if not wanted or (options.clock.over and found["rows"]):
            continue
        truth = truth_of(name, steps, options.device)
        for dtype in wanted:
            if options.clock.over and found["rows"]:
                continue
            found["rows"] += measure(name, dtype, *truth, steps=steps, rounds=rounds, device=options.device)
            save(stored, found, folder)  # a run that is stopped keeps its rows
    write(stored, found, folder, table, draw)


if __name__ == "__main__":
    main()
