"""Sweeps of every solver on every network: `python -m experiments.deer.iterations`; results beside this file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.deer.networks import HIDDEN, LAYERS, REGIMES, TRAINED, build, latch
from timeloom.solvers import DEER, ELK, Jacobi, Picard, QuasiDEER, QuasiELK, Shooting, Solver

STEPS, SEQUENCES, LIMIT, TOLERANCE = 1024, 2, 200, 1e-6
RESULTS = Path(__file__).with_name("results")
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


def main() -> None:
    x, _ = latch(STEPS, SEQUENCES, torch.Generator().manual_seed(1))
    rows = []
    for kind in LAYERS:
        for regime in (*REGIMES, TRAINED):
            layer, told = build(kind, regime)
            counts = {name: count(layer, solver, x.double()) for name, solver in SOLVERS.items()}
            rows.append({"layer": kind, "network": regime, "training": told, "solvers": counts})
            print(kind, regime, told, {name: c["sweeps"] for name, c in counts.items()}, flush=True)
    RESULTS.mkdir(exist_ok=True)
    setting = {"steps": STEPS, "sequences": SEQUENCES, "limit": LIMIT, "tolerance": TOLERANCE, "dtype": "float64"}
    (RESULTS / "iterations.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    (RESULTS / "iterations.md").write_text(table(rows))
    plot(rows)


def table(rows: list[dict]) -> str:
    lines = [f"| layer | network | {' | '.join(SOLVERS)} |", "| --- " * (len(SOLVERS) + 2) + "|"]
    for row in rows:
        cells = [str(c["sweeps"]) if c["converged"] else f"> {c['sweeps']}" for c in row["solvers"].values()]
        lines.append(f"| {row['layer']} | {row['network']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LAYERS), figsize=(11, 5), sharex=True, sharey=True)
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
    figure.legend(handles, list(colors), loc="lower center", ncols=len(SOLVERS), frameon=False, fontsize=8)
    figure.suptitle(
        f"T = {STEPS}, {HIDDEN} hidden units; open circles: given up there, at {LIMIT} sweeps at the latest",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(RESULTS / "iterations.png", dpi=110)


if __name__ == "__main__":
    main()
