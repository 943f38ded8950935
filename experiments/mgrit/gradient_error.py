"""How wrong are gradients after a fixed number of cycles? By network, regime, coarse step and relaxation.

    python -m experiments.mgrit.gradient_error

Random inputs, a loss on the last state, exact gradients from a sequential pass, all in float64. Writes
results/gradient_error.json and .png.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import timeloom as tl
from experiments.results import facts, save
from timeloom.solvers import MGRIT

FOLDER = Path(__file__).with_name("results")
STEPS, BATCH, SIZE = 128, 8, 32
CYCLES = (1, 2, 3, 4, 6, 8)
NETWORKS = {"GRU": tl.GRU, "ImplicitGRU": tl.ImplicitGRU}
REGIMES = {"default": (0.0, 1.0), "gate bias +4": (4.0, 1.0), "weights ×2": (0.0, 2.0), "weights ×3": (0.0, 3.0)}
"""What is added to the update gate's bias, and what the recurrent weights are multiplied by."""
METHODS: dict[str, Callable[[int], MGRIT]] = {
    "published: implicit, inject; F": lambda k: published(k),
    "implicit, inject; FCF": lambda k: published(k, relaxation="FCF"),
    "frozen, mean; F": lambda k: published(k, coarse="frozen", coarse_inputs="mean"),
    "frozen, mean; FCF": lambda k: published(k, coarse="frozen", coarse_inputs="mean", relaxation="FCF"),
    "MGRIT(levels=3, coarsening=4)": lambda k: MGRIT(
        levels=3, coarsening=4, max_iters=k, on_divergence="ignore", check_gradient_every=1
    ),
}
"""Coarse steps, their inputs, relaxation on the fine level. The last: frozen, mean, FCF, a warm-up, guarded."""
STYLES = ("#c8553d:", "#c8553d-", "#0b6e99:", "#0b6e99-", "#111111-")
SEEDS = (0, 1, 2)


def published(cycles: int, **changes: Any) -> MGRIT:
    """The paper's levels with so many full cycles in both passes."""
    setting = {"cycles": cycles, "backward_cycles": cycles, "skip_down": False, "check_gradient_every": 1}
    return MGRIT.paper(**(setting | changes))


def gradient(network: str, regime: str, solver: MGRIT) -> dict[str, float]:
    """Relative error and cosine of the recurrent weights' gradient: medians over the seeds."""
    checks = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        layer = NETWORKS[network](SIZE, SIZE, dtype=torch.float64, solver=solver)
        bias, scale = REGIMES[regime]
        with torch.no_grad():
            layer.bias_ih_l0[SIZE : 2 * SIZE] += bias
            layer.weight_hh_l0 *= scale
        _, last = layer(torch.randn(STEPS, BATCH, SIZE, dtype=torch.float64))
        last.sum().backward()
        checks.append(layer.reports[0].backward.gradient)
    return {key: statistics.median(getattr(check, key) for check in checks) for key in ("error", "cosine")}


def main() -> None:
    rows = []
    for network in NETWORKS:
        for regime in REGIMES:
            where = {"network": network, "regime": regime}
            for method, solver in METHODS.items():
                for cycles in CYCLES:
                    rows.append(
                        {**where, "method": method, "cycles": cycles, **gradient(network, regime, solver(cycles))}
                    )
            exactly = gradient(network, regime, MGRIT.paper(check_gradient_every=1))
            rows.append({**where, "method": "as published", "cycles": "2 forward, 1 backward, skip down", **exactly})
            print(network, regime, "as published:", {key: f"{value:.2g}" for key, value in exactly.items()})
    sizes = {"T": STEPS, "B": BATCH, "n": SIZE, "seeds": len(SEEDS)}
    save("gradient_error", {"sizes": sizes, "facts": facts(), "rows": rows}, FOLDER)
    draw(rows)


def draw(rows: list[dict[str, Any]]) -> None:
    figure = Figure(figsize=(4 * len(REGIMES), 3.4 * len(NETWORKS)), layout="constrained")
    axes = figure.subplots(len(NETWORKS), len(REGIMES), sharey=True)
    for i, network in enumerate(NETWORKS):
        for j, regime in enumerate(REGIMES):
            axis = axes[i][j]
            here = [row for row in rows if (row["network"], row["regime"]) == (network, regime)]
            for style, method in zip(STYLES, METHODS, strict=True):
                line = [row for row in here if row["method"] == method]
                axis.semilogy(
                    [row["cycles"] for row in line], [max(row["error"], 1e-16) for row in line],
                    color=style[:-1], linestyle=style[-1], marker="o", markersize=3, label=method,
                )  # fmt: skip
            exactly = next(row for row in here if row["method"] == "as published")
            axis.axhline(exactly["error"], color="grey", linewidth=0.8, label="as published (2 + 1 cycles, skip down)")
            axis.set_title(f"{network}, {regime}", fontsize="medium")
            axis.set_xlabel("cycles, forward and backward")
    for row in axes:
        row[0].set_ylabel("relative error of the gradient")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(FOLDER / "gradient_error.png", dpi=110)


if __name__ == "__main__":
    main()
