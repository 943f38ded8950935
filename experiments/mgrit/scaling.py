"""Time of a training step against the length of the sequence: torch's GRU, ours, and the paper's implicit GRU.

    python -m experiments.mgrit.scaling [--device cuda]

One sequence (B=1), n=32, default initialisation and long memory (update-gate bias +6), float32, tolerance 1e-5 on
a CPU. The GRU by shooting and by multigrid; the implicit GRU of the multigrid paper in one chunk (serially, by the same
kernels) and by multigrid. Each point is the fastest of the turns that the ways took one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import timeloom as tl
from experiments.harness import (
    COLOURS,
    Results,
    begin,
    command,
    facts,
    figure,
    folder_of,
    made_on,
    markdown,
    save,
    write,
)
from timeloom.solvers import MGRIT, Shooting

SIZE, BIASES = 32, {"default": 0.0, "gate bias +6": 6.0}
LENGTHS, FAST_LENGTHS = tuple(2**k for k in range(7, 17)), (64, 128)
SOLVERS = ("torch.nn.GRU", "shooting", "multigrid", "implicit GRU, one chunk", "implicit GRU, multigrid")
TOLERANCE = {"cpu": 1e-5, "cuda": None}
"""On a GPU the default one."""
SERIAL_UP_TO = {"cpu": 2**16, "cuda": 2**15}
"""Steps up to which torch's layer is run: cuDNN refuses longer ones."""
KERNELS_FROM = 8192
TURNS, PATIENCE = 5, 2.0
"""Turns of each solver at each length; fewer where a turn takes longer than this many seconds."""


def measure(steps: int, bias: float, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    truth = nn.GRU(SIZE, SIZE, device=device)
    with torch.no_grad():
        truth.bias_ih_l0[SIZE : 2 * SIZE] += bias
    layers: dict[str, nn.GRU] = {}
    if steps <= SERIAL_UP_TO[device]:
        layers["torch.nn.GRU"] = truth
    tol = TOLERANCE[device]
    solvers = (Shooting(tol=tol), MGRIT(tol=tol), Shooting(chunk=steps), MGRIT(tol=tol))
    for name, solver in zip(SOLVERS[1:], solvers, strict=True):
        kind = tl.ImplicitGRU if name.startswith("implicit") else tl.GRU
        layers[name] = kind(SIZE, SIZE, device=device, solver=solver)
        layers[name].load_state_dict(truth.state_dict())
    x = torch.randn(steps, 1, SIZE, device=device, requires_grad=True)
    seconds = {name: [step(layer, x, device)] for name, layer in layers.items()}  # the first call warms up
    turns = {name: TURNS if first[0] < PATIENCE else 1 for name, first in seconds.items()}
    for turn in range(TURNS):
        for name, layer in layers.items():
            if turn < turns[name]:
                seconds[name].append(step(layer, x, device))
    result: dict[str, Any] = {"steps": steps}
    for name, layer in layers.items():
        taken = [1e3 * value for value in seconds[name][1:]]
        result[name] = {"milliseconds": min(taken), "median": statistics.median(taken)}
        if layer is not truth:
            report = layer.reports[0]
            result[name] |= {
                "forward": report.iterations, "backward": report.backward.iterations, "chunk": report.chunk,
                "solver": report.solver, "fell back": report.fell_back or report.backward.fell_back,
            }  # fmt: skip
    return result


def step(layer: nn.GRU, x: torch.Tensor, device: str) -> float:
    began = time.perf_counter()
    output, _ = layer(x)
    output.sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measured(results: Results) -> list[str]:
    """Ways that were timed at some length."""
    return [name for name in SOLVERS if any(name in row for rows in results["regimes"].values() for row in rows)]


def table(results: Results) -> str:
    """A line for each regime and length."""
    ways = measured(results)
    cells = [
        [regime, row["steps"], *(f"{row[name]['milliseconds']:.3g} ms" if name in row else "–" for name in ways)]
        for regime, rows in results["regimes"].items()
        for row in rows
    ]
    about = f"Forward + backward, random inputs, n = {results['n']}, B = {results['B']}. {made_on(results['machine'])}."
    return "\n".join([about, "", *markdown(["network", "T", *ways], cells)]) + "\n"


def draw(results: Results, path: Path) -> None:
    rows = results["regimes"]
    drawn, axes = figure(5.2 * len(rows), 4, 1, len(rows), sharey=True)
    for axis, (regime, points) in zip(axes[0], rows.items(), strict=True):
        for color, name in zip(COLOURS, measured(results), strict=False):
            here = [point for point in points if name in point]
            axis.loglog(
                [point["steps"] for point in here], [point[name]["milliseconds"] for point in here],
                marker="o", color=color, label=name, base=2,
            )  # fmt: skip
        axis.set_yscale("log", base=10)
        axis.set_title(f"n={SIZE}, B=1, {regime}")
        axis.set_xlabel("steps")
    axes[0][0].set_ylabel("forward + backward, ms")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    drawn.suptitle(made_on(results["machine"]), fontsize=8)
    drawn.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__), arguments)
    results: dict[str, Any] = {"n": SIZE, "B": 1, "machine": facts(options.device), "regimes": {r: [] for r in BIASES}}
    name, folder = f"scaling_{options.device}", folder_of(options, __file__)
    if not options.fast:  # kernels of a network are made where enough work asks for them: let nothing below see that
        measure(KERNELS_FROM, 0.0, options.device)
    for steps in FAST_LENGTHS if options.fast else LENGTHS:
        for regime, bias in BIASES.items():
            if not options.clock.over:
                found = measure(steps, bias, options.device)
                results["regimes"][regime].append(found)
                print(regime, steps, {way: f"{found[way]['milliseconds']:.1f} ms" for way in SOLVERS if way in found},
                      flush=True)  # fmt: skip
                save(name, results, folder)
    write(name, results, folder, table, draw)


if __name__ == "__main__":
    main()
