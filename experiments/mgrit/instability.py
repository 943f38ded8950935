"""Why the multigrid paper has an implicit GRU: what explicit coarse steps do, by how far they go.

    python -m experiments.mgrit.instability

A GRU is a step of size 1 of `h' = (1 − z)(n − h)`. A coarse level takes steps of size m: explicitly, `h + m (1 − z)(n −
h)`, which overshoots as soon as m (1 − z) is large; implicitly, as in the paper; or with frozen gates, `z^m h + (1 −
z^m) n`, as timeloom does by default. Two levels, a fixed number of cycles from the initial state, relative residual
behind each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import timeloom as tl
from experiments.harness import (
    COLOURS,
    Results,
    attempt,
    begin,
    command,
    errors,
    facts,
    figure,
    folder_of,
    good,
    made_on,
    markdown,
    write,
)  # fmt: skip
from timeloom.solvers import MGRIT

FULL: Results = {"T": 256, "B": 4, "n": 32, "cycles": 8, "factors": [2, 4, 8, 16]}
FAST: Results = {"T": 32, "B": 2, "n": 4, "cycles": 3, "factors": [2, 8]}
STEPS = ("explicit", "implicit", "frozen")


def explicit(layer: tl.GRU) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """An explicit Euler step over `span` steps: h `(N, n)`, x the projected inputs `(N, 3n)`, span `(N, 1)`."""
    weight, bias = (value.detach().double() for value in (layer.weight_hh_l0, layer.bias_hh_l0))

    def step(h: Tensor, x: Tensor, span: Tensor) -> Tensor:
        x_r, x_z, x_n = x.chunk(3, -1)
        h_r, h_z, h_n = (h @ weight.t()).chunk(3, -1)
        reset, keep = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        candidate = torch.tanh(x_n + reset * (h_n + bias[2 * h.shape[-1] :]))
        return h + span * (1 - keep) * (candidate - h)

    return step


def residuals(kind: str, factor: int, sizes: Results) -> list[float]:
    """After every cycle."""
    torch.manual_seed(0)
    layer = tl.GRU(sizes["n"], sizes["n"], dtype=torch.float64)
    layer.solver = MGRIT(
        levels=2, coarsening=factor, coarse=explicit(layer) if kind == "explicit" else kind, relaxation="F",
        cycles=sizes["cycles"], guess="initial", on_divergence="ignore", tol=1e-14,
    )  # fmt: skip
    x = torch.randn(sizes["T"], sizes["B"], sizes["n"], dtype=torch.float64)
    with torch.no_grad():
        layer(x)
    return [float(value) for value in layer.reports[0].residuals]


def table(results: Results) -> str:
    sizes = results["sizes"]
    cells = []
    for row in good(results["rows"]):
        last = row["residuals"][-1] if row["residuals"] else math.nan
        cells.append([row["step"], row["factor"], f"{row['residuals'][0]:.1e}", f"{last:.1e}", len(row["residuals"])])
    about = (
        f"GRU of {sizes['n']} units as initialised, random inputs, T = {sizes['T']}, float64, two levels, "
        "F-relaxation; "
        f"{made_on(results['machine'])}."
    )
    head = ["coarse step", "steps in one", "residual at first", "at last", "cycles"]
    return "\n".join([about, "", *markdown(head, cells), *errors(results["rows"], ("step", "factor"))]) + "\n"


def draw(results: Results, path: Path) -> None:
    factors = results["sizes"]["factors"]
    drawn, axes = figure(3.2 * len(factors), 3.4, 1, len(factors), sharey=True)
    for axis, factor in zip(axes[0], factors, strict=True):
        for colour, row in zip(
            COLOURS, (row for row in good(results["rows"]) if row["factor"] == factor), strict=False
        ):
            values = [max(value, 1e-16) for value in row["residuals"]]
            axis.semilogy(range(1, 1 + len(values)), values, ".-", color=colour, label=f"{row['step']} coarse step")
        axis.set(xlabel="cycles", title=f"{factor} steps in one")
    axes[0][0].set_ylabel("relative residual")
    axes[0][0].legend(*axes[0][0].get_legend_handles_labels(), fontsize=8)  # none, where no time was left
    sizes = results["sizes"]
    drawn.suptitle(
        f"GRU of {sizes['n']} units as initialised, T = {sizes['T']}; a line ends where the solver gave up", fontsize=9
    )
    drawn.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__, gpu=False), arguments)
    sizes = FAST if options.fast else FULL
    rows = []
    for factor in sizes["factors"]:
        for kind in STEPS:
            if options.clock.over:
                break
            found = attempt(
                {"step": kind, "factor": factor}, lambda k=kind, f=factor: {"residuals": residuals(k, f, sizes)}
            )
            rows.append(found)
    results = {"machine": facts(), "sizes": sizes, "rows": rows}
    print(table(results))
    write("instability", results, folder_of(options, __file__), table, draw)


if __name__ == "__main__":
    main()
