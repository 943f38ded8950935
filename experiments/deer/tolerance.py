"""What a tolerance buys: sweeps, and errors of outputs and gradients, by the residual at which a solver stops.

    python -m experiments.deer.tolerance

Float64, a GRU of 8 units as initialised and one trained to remember a value (`networks`), from zero starts. Errors are
against the sequential run, relative to the largest entry. Sweeps and errors do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.deer.networks import HIDDEN, TRAINED, build, latch
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
    markdown,
    write,
)
from timeloom.solvers import DEER, QuasiDEER, Shooting, Solver

FULL: Results = {"T": 1024, "B": 2, "networks": ["as initialised", TRAINED], "powers": list(range(1, 13))}
FAST: Results = {"T": 48, "B": 2, "networks": ["as initialised"], "powers": [1, 4, 12]}
LIMIT = 200
SOLVERS: dict[str, Callable[[float, int], Solver]] = {
    "DEER": lambda tol, _: DEER(tol=tol, max_iters=LIMIT),
    "quasi-DEER": lambda tol, _: QuasiDEER(tol=tol, max_iters=LIMIT),
    "shooting": lambda tol, steps: Shooting(
        chunk=max(steps // 32, 2), warmup=0, correction="newton", tol=tol, max_iters=LIMIT
    ),
}
SHOWN = {"output_error": "outputs", "gradient_error": "gradient of the recurrent weights"}


def passes(layer: nn.RNNBase, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradient of the recurrent weights for a loss on all of them."""
    layer.zero_grad()
    y, _ = layer(x)
    y.square().mean().backward()
    return y.detach(), layer.weight_hh_l0.grad.clone()


def case(layer: nn.RNNBase, solver: Solver, x: Tensor, truth: tuple[Tensor, Tensor]) -> Results:
    layer.solver = solver
    found, report = passes(layer, x), layer.reports[0]
    off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True)]
    backward = report.backward.iterations if report.backward else 0
    fell_back = bool(report.fell_back or (report.backward and report.backward.fell_back))
    return dict(zip(SHOWN, off, strict=True)) | {"sweeps": [report.iterations, backward], "fell_back": fell_back}


def table(results: Results) -> str:
    sizes = results["sizes"]
    cells = []
    for row in good(results["rows"]):
        sweeps = " + ".join(map(str, row["sweeps"])) + (" (fell back)" if row["fell_back"] else "")
        off = [f"{row[key]:.0e}" for key in SHOWN]
        cells.append([row["network"], row["solver"], f"1e-{row['power']}", sweeps, *off])
    about = f"GRU of {HIDDEN} units, T = {sizes['T']}, B = {sizes['B']}, float64; errors against the sequential run."
    head = [
        "network",
        "solver",
        "tolerance",
        "sweeps, forward + backward",
        *(f"error: {one}" for one in SHOWN.values()),
    ]
    failed = errors(results["rows"], ("network", "solver", "power"))
    return "\n".join([about, "", *markdown(head, cells, 2), *failed]) + "\n"


def draw(results: Results, path: Path) -> None:
    """Errors and sweeps by tolerance; a line of pictures for each network."""
    networks, rows = results["sizes"]["networks"], good(results["rows"])
    drawn, axes = figure(12, 3.4 * len(networks) + 0.6, len(networks), 3)
    for line, network in zip(axes, networks, strict=True):
        for colour, solver in zip(COLOURS, SOLVERS, strict=False):
            here = [row for row in rows if (row["network"], row["solver"]) == (network, solver)]
            at = [10.0 ** -row["power"] for row in here]
            for axis, key in zip(line, SHOWN, strict=False):
                axis.loglog(at, [max(row[key], 1e-17) for row in here], ".-", color=colour, label=solver)
                fell = [(10.0 ** -row["power"], max(row[key], 1e-17)) for row in here if row["fell_back"]]
                axis.loglog([t for t, _ in fell], [e for _, e in fell], "o", color=colour, markerfacecolor="white")
            line[2].semilogx(at, [row["sweeps"][0] for row in here], ".-", color=colour)
        for axis, words in zip(line, SHOWN.values(), strict=False):
            axis.loglog([1e-12, 1e-1], [1e-12, 1e-1], ":", color="grey", label="error = tolerance")
            axis.set(ylabel="relative error", title=f"{network}: {words}")
        line[2].set(ylabel="sweeps, forward", title=f"{network}: sweeps", ylim=(0, None))
        for axis in line:
            axis.set_xlabel("tolerance")
            axis.title.set_fontsize(9)
    drawn.suptitle("open circles: given up, and run sequentially from there", fontsize=9)
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    drawn.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__, gpu=False), arguments)
    sizes = FAST if options.fast else FULL
    x = latch(sizes["T"], sizes["B"], torch.Generator().manual_seed(1))[0].double()
    rows: list[Results] = []
    for network in sizes["networks"]:
        layer, _ = build("GRU", network)
        layer.solver = "sequential"
        truth = passes(layer, x)
        for name, solver in SOLVERS.items():
            for power in sizes["powers"]:
                if not options.clock.over:
                    where = {"network": network, "solver": name, "power": power}
                    made = solver(10.0**-power, sizes["T"])
                    rows.append(attempt(where, lambda made=made, net=layer, true=truth: case(net, made, x, true)))
    results = {"machine": facts(), "sizes": sizes, "rows": rows}
    print(table(results))
    write("tolerance", results, folder_of(options, __file__), table, draw)


if __name__ == "__main__":
    main()
