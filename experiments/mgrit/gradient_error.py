"""How wrong are gradients after a fixed number of cycles? By network, regime, coarse step and relaxation.

    python -m experiments.mgrit.gradient_error

Random inputs, a loss on the last state, exact gradients from a sequential pass in float64. Writes
results/gradient_error.json and .png.
"""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

import timeloom as tl
from experiments.mgrit.results import FOLDER, facts, save
from timeloom.solvers import MGRIT

STEPS, BATCH, SIZE = 128, 8, 32
CYCLES = (1, 2, 3, 4, 6, 8)
NETWORKS = {"GRU": tl.GRU, "ImplicitGRU": tl.ImplicitGRU}
REGIMES = {"default": (0.0, 1.0), "gate bias +4": (4.0, 1.0), "weights ×2": (0.0, 2.0), "weights ×3": (0.0, 3.0)}
"""What is added to the update gate's bias, and what the recurrent weights are multiplied by."""
METHODS: dict[str, dict[str, Any]] = {
    "implicit, inject (paper)": {"coarse": "implicit", "coarse_inputs": "inject"},
    "frozen, mean (ours)": {"coarse": "frozen", "coarse_inputs": "mean"},
}
RELAXATIONS: dict[str, Any] = {"F above, FCF below": ("F", "FCF"), "FCF": "FCF"}


def gradient(network: str, regime: str, solver: MGRIT) -> dict[str, float]:
    """Relative error and cosine of the recurrent weights' gradient."""
    torch.manual_seed(0)
    layer = NETWORKS[network](SIZE, SIZE, dtype=torch.float64, solver=solver)
    bias, scale = REGIMES[regime]
    with torch.no_grad():
        layer.bias_ih_l0[SIZE : 2 * SIZE] += bias
        layer.weight_hh_l0 *= scale
    _, last = layer(torch.randn(STEPS, BATCH, SIZE, dtype=torch.float64))
    last.sum().backward()
    report = layer.reports[0]
    check = report.backward.gradient
    return {"error": check.error, "cosine": check.cosine, "forward residual": report.residuals[-1]}


def main() -> None:
    rows = []
    for network in NETWORKS:
        for regime in REGIMES:
            for method, coarse in METHODS.items():
                for relaxation, pattern in RELAXATIONS.items():
                    for cycles in CYCLES:
                        solver = MGRIT.paper(
                            cycles=cycles, backward_cycles=cycles, skip_down=False, relaxation=pattern,
                            check_gradient_every=1, **coarse,
                        )  # fmt: skip
                        row = {"network": network, "regime": regime, "method": method, "relaxation": relaxation}
                        rows.append({**row, "cycles": cycles, **gradient(network, regime, solver)})
            published = gradient(network, regime, MGRIT.paper(check_gradient_every=1))
            row = {"network": network, "regime": regime, "method": "as published", "relaxation": "F above, FCF below"}
            rows.append({**row, "cycles": "2 forward, 1 backward, skip down", **published})
            print(network, regime, "as published:", {key: f"{value:.2g}" for key, value in published.items()})
    save("gradient_error", {"sizes": {"T": STEPS, "B": BATCH, "n": SIZE}, "facts": facts(), "rows": rows})
    draw(rows)


def draw(rows: list[dict[str, Any]]) -> None:
    figure = Figure(figsize=(4 * len(REGIMES), 3.4 * len(NETWORKS)), layout="constrained")
    axes = figure.subplots(len(NETWORKS), len(REGIMES), sharey=True)
    for i, network in enumerate(NETWORKS):
        for j, regime in enumerate(REGIMES):
            axis = axes[i][j]
            here = [row for row in rows if (row["network"], row["regime"]) == (network, regime)]
            for color, method in zip(("#c8553d", "#0b6e99"), METHODS, strict=True):
                for style, relaxation in zip((":", "-"), RELAXATIONS, strict=True):
                    line = [row for row in here if (row["method"], row["relaxation"]) == (method, relaxation)]
                    axis.semilogy(
                        [row["cycles"] for row in line], [max(row["error"], 1e-16) for row in line],
                        color=color, linestyle=style, marker="o", markersize=3, label=f"{method}; {relaxation}",
                    )  # fmt: skip
            published = next(row for row in here if row["method"] == "as published")
            axis.axhline(published["error"], color="grey", linewidth=0.8, label="as published (2 + 1 cycles)")
            axis.set_title(f"{network}, {regime}", fontsize="medium")
            axis.set_xlabel("cycles, forward and backward")
    for row in axes:
        row[0].set_ylabel("relative error of the gradient")
    axes[0][0].legend(fontsize="x-small")
    figure.savefig(FOLDER / "gradient_error.png", dpi=110)


if __name__ == "__main__":
    main()
