"""Sweeps of every solver on every network: `python -m experiments.deer.iterations`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.deer.networks import HIDDEN, LAYERS, REGIMES, TRAINED, build, latch
from experiments.harness import Clock, Results, begin, command, facts, figure, folder_of, markdown, write
from timeloom.solvers import DEER, ELK, Jacobi, Picard, QuasiDEER, QuasiELK, Shooting, Solver

STEPS, FAST_STEPS, SEQUENCES, LIMIT, TOLERANCE = 1024, 48, 2, 200, 1e-6
OPTIONS = {"tol": TOLERANCE, "max_iters": LIMIT}
SOLVERS: dict[str, Solver] = {
    "Jacobi": Jacobi(**OPTIONS),
    "Picard": Picard(**OPTIONS),
    "quasi-DEER": QuasiDEER(**OPTIONS),
    "quasi-ELK": QuasiELK(**OPTIONS),
    "DEER": DEER(**OPTIONS),
    "ELK": ELK(**OPTIONS),
    "shooting, 32 chunks": Shooting(chunk=STEPS // 32, warmup=0, correction="newton", **OPTIONS),
}


def count(layer: nn.RNNBase, solver: Solver, x: Tensor) -> dict[str, object]:
    layer.solver = solver
    with torch.no_grad():
        layer(x)
    report = layer.reports[0]
    return {"sweeps": report.iterations, "converged": not report.fell_back, "seconds": round(report.seconds, 3)}


def measure(steps: int, regimes: Sequence[str], clock: Clock) -> list[Results]:
    """A row for each kind of layer and network, as far as the time goes."""
    x, _ = latch(steps, SEQUENCES, torch.Generator().manual_seed(1))
    rows = []
    for kind in LAYERS:
        for regime in regimes:
            if clock.over:
                return rows
            layer, told = build(kind, regime)
            counts = {name: count(layer, solver, x.double()) for name, solver in SOLVERS.items()}
            rows.append({"layer": kind, "network": regime, "training": told, "solvers": counts})
            print(kind, regime, told, {name: c["sweeps"] for name, c in counts.items()}, flush=True)
    return rows


def table(results: Results) -> str:
    cells = [
        [
            row["layer"],
            row["network"],
            *(str(c["sweeps"]) if c["converged"] else f"> {c['sweeps']}" for c in row["solvers"].values()),
        ]
        for row in results["rows"]
    ]
    return "\n".join(markdown(["layer", "network", *SOLVERS], cells, 2)) + "\n"


def plot(results: Results, path: Path) -> None:
    rows = results["rows"]
    drawn, both = figure(11, 5, 1, len(LAYERS), sharex=True, sharey=True)
    axes = both[0]
    colors = dict(
        zip(SOLVERS, ("#999999", "#c9a227", "#4c9f70", "#1b6b4a", "#3b6fb6", "#16325c", "#c0392b"), strict=True)
    )
    for axis, kind in zip(axes, LAYERS, strict=True):
        own = [row for row in rows if row["layer"] == kind]
        for i, row in enumerate(own):
            for j, (name, c) in enumerate(row["solvers"].items()):
                height = i + (j - len(SOLVERS) / 2 + 0.5) * 0.11
                axis.plot([1, c["sweeps"]], [height, height], color=colors[name], linewidth=1, alpha=0.5)
                face = colors[name] if c["converged"] else "white"
                axis.plot(c["sweeps"], height, "o", color=colors[name], markerfacecolor=face, markersize=5)
        axis.set(title=kind, xscale="log", xlabel="sweeps until every residual is below 1e-6", xlim=(0.9, 1.3 * LIMIT))
        axis.set_yticks(range(len(own)), [row["network"] for row in own])
        axis.invert_yaxis() if kind == next(iter(LAYERS)) else None
        axis.grid(axis="x", alpha=0.3)
    handles = [axes[0].plot([], [], "o", color=color)[0] for color in colors.values()]
    drawn.legend(handles, list(colors), loc="outside lower center", ncols=len(SOLVERS), frameon=False, fontsize=8)
    drawn.suptitle(
        f"T = {results['setting']['steps']}, {HIDDEN} hidden units; open circles: given up there, at {LIMIT} sweeps "
        "at the latest",
        fontsize=10,
    )
    drawn.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__, gpu=False), arguments)
    steps = FAST_STEPS if options.fast else STEPS
    regimes = [*REGIMES][:2] if options.fast else [*REGIMES, TRAINED]
    setting = {"steps": steps, "sequences": SEQUENCES, "limit": LIMIT, "tolerance": TOLERANCE, "dtype": "float64"}
    results = {"setting": setting, "machine": facts(), "rows": measure(steps, regimes, options.clock)}
    write("iterations", results, folder_of(options, __file__), table, plot)


if __name__ == "__main__":
    main()
