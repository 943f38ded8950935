"""How wrong are gradients after a fixed number of cycles? By network, regime, coarse step and relaxation.

    python -m experiments.mgrit.gradient_error

Random inputs, a loss on the last state, exact gradients from a sequential pass, all in float64.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import timeloom as tl
from experiments.harness import Clock, Results, begin, command, facts, figure, folder_of, made_on, markdown, write
from timeloom.solvers import MGRIT

FULL: Results = {"T": 128, "B": 8, "n": 32, "seeds": 3, "cycles": [1, 2, 3, 4, 6, 8]}
FAST: Results = {"T": 32, "B": 2, "n": 4, "seeds": 1, "cycles": [1, 4]}
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
EXACTLY = "as published"


def published(cycles: int, **changes: Any) -> MGRIT:
    """The paper's levels with so many full cycles in both passes."""
    setting = {"cycles": cycles, "backward_cycles": cycles, "skip_down": False, "check_gradient_every": 1}
    return MGRIT.paper(**(setting | changes))


def gradient(network: str, regime: str, solver: MGRIT, sizes: Results) -> dict[str, float]:
    """Relative error and cosine of the recurrent weights' gradient: medians over the seeds."""
    checks = []
    size = sizes["n"]
    for seed in range(sizes["seeds"]):
        torch.manual_seed(seed)
        layer = NETWORKS[network](size, size, dtype=torch.float64, solver=solver)
        bias, scale = REGIMES[regime]
        with torch.no_grad():
            layer.bias_ih_l0[size : 2 * size] += bias
            layer.weight_hh_l0 *= scale
        _, last = layer(torch.randn(sizes["T"], sizes["B"], size, dtype=torch.float64))
        last.sum().backward()
        checks.append(layer.reports[0].backward.gradient)
    return {key: statistics.median(getattr(check, key) for check in checks) for key in ("error", "cosine")}


def measure(sizes: Results, clock: Clock) -> list[Results]:
    """A row for each network, regime, method and number of cycles, as far as the time goes."""
    rows = []
    for network in NETWORKS:
        for regime in REGIMES:
            if clock.over:
                return rows
            where = {"network": network, "regime": regime}
            for method, solver in METHODS.items():
                for cycles in sizes["cycles"]:
                    found = gradient(network, regime, solver(cycles), sizes)
                    rows.append({**where, "method": method, "cycles": cycles, **found})
            exactly = gradient(network, regime, MGRIT.paper(check_gradient_every=1), sizes)
            rows.append({**where, "method": EXACTLY, "cycles": "2 forward, 1 backward, skip down", **exactly})
            print(network, regime, "as published:", {key: f"{value:.2g}" for key, value in exactly.items()}, flush=True)
    return rows


def table(results: Results) -> str:
    """The published setting, and two methods after four cycles."""
    sizes, rows = results["sizes"], {}
    for row in results["rows"]:
        if row["method"] == EXACTLY or row["cycles"] == 4:
            rows.setdefault((row["network"], row["regime"]), {})[row["method"]] = row
    shown = [EXACTLY, "published: implicit, inject; F", "frozen, mean; FCF"]
    cells = [
        [*where, *(f"{found[name]['error']:.1e} (cosine {found[name]['cosine']:.3f})" for name in shown)]
        for where, found in rows.items()
    ]
    return (
        "\n".join(
            [
                f"Relative error of the recurrent weights' gradient: random inputs, T = {sizes['T']}, n = "
                f"{sizes['n']}, "
                f"B = {sizes['B']}, float64, medians of {sizes['seeds']} seed(s). {made_on(results['machine'])}.",
                "",
                *markdown(
                    [
                        "network",
                        "regime",
                        "as published (2 + 1 cycles)",
                        "implicit, inject, F: 4 cycles",
                        "frozen, mean, FCF: 4 cycles",
                    ],
                    cells,
                    2,
                ),
            ]
        )
        + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__, gpu=False), arguments)
    sizes = FAST if options.fast else FULL
    results = {"sizes": sizes, "machine": facts(), "rows": measure(sizes, options.clock)}
    write("gradient_error", results, folder_of(options, __file__), table, draw)


def draw(results: Results, path: Path) -> None:
    rows = results["rows"]
    drawn, axes = figure(4 * len(REGIMES), 3.4 * len(NETWORKS), len(NETWORKS), len(REGIMES), sharey=True)
    for i, network in enumerate(NETWORKS):
        for j, regime in enumerate(REGIMES):
            axis = axes[i][j]
            here = [row for row in rows if (row["network"], row["regime"]) == (network, regime)]
            if not here:  # its time was over
                axis.set_axis_off()
                continue
            for style, method in zip(STYLES, METHODS, strict=True):
                line = [row for row in here if row["method"] == method]
                axis.semilogy(
                    [row["cycles"] for row in line],
                    [max(row["error"], 1e-16) for row in line],
                    color=style[:-1],
                    linestyle=style[-1],
                    marker="o",
                    markersize=3,
                    label=method,
                )
            exactly = next(row for row in here if row["method"] == EXACTLY)
            axis.axhline(exactly["error"], color="grey", linewidth=0.8, label="as published (2 + 1 cycles, skip down)")
            axis.set_title(f"{network}, {regime}", fontsize="medium")
            axis.set_xlabel("cycles, forward and backward")
    for row in axes:
        row[0].set_ylabel("relative error of the gradient")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    drawn.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
