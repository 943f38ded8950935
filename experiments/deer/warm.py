"""What a warm start saves: sweeps and time of an epoch from the states of the last one, and from none.

    python -m experiments.deer.warm
    python -m experiments.deer.warm --device cuda

A GRU is trained to remember a value (`networks.latch`), on the same samples in every epoch, by several solvers, each
with and without `timeloom.WarmStarts`. All runs see the same batches; what is found does not depend on the guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import timeloom as tl
from experiments.deer.networks import INPUTS, latch
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
    now,
    write,
)  # fmt: skip
from timeloom.solvers import DEER, QuasiDEER, Shooting, Solver

FULL: Results = {"T": 2048, "samples": 32, "batch": 8, "n": 16, "epochs": 8}
FAST: Results = {"T": 64, "samples": 4, "batch": 2, "n": 4, "epochs": 2}
SOLVERS: dict[str, Solver] = {
    "DEER": DEER(),
    "quasi-DEER": QuasiDEER(),
    "shooting": Shooting(warmup=0, correction="newton"),
}


def train(solver: Solver, warm: bool, sizes: Results, device: str) -> Results:
    """Sweeps of every epoch (means), its seconds, and its mean loss."""
    torch.manual_seed(0)
    x, target = (part.to(device) for part in latch(sizes["T"], sizes["samples"], torch.Generator().manual_seed(1)))
    layer, head = tl.GRU(INPUTS, sizes["n"], solver=solver).to(device), nn.Linear(sizes["n"], 1).to(device)
    optimizer, store = torch.optim.Adam([*layer.parameters(), *head.parameters()], 5e-3), tl.WarmStarts()
    epochs: dict[str, list[float]] = {"sweeps": [], "seconds": [], "losses": []}
    for _ in range(sizes["epochs"]):
        sweeps, losses, began = list[int](), list[float](), now(device)
        for rows in torch.arange(sizes["samples"]).split(sizes["batch"]):
            y, _ = layer(x[:, rows], guess=store.of(rows)) if warm else layer(x[:, rows])
            loss = (head(y).squeeze(-1) - target[:, rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sweeps.append(layer.reports[0].iterations)
            losses.append(loss.item())
        for key, value in (
            ("sweeps", sum(sweeps) / len(sweeps)),
            ("seconds", now(device) - began),
            ("losses", sum(losses) / len(losses)),
        ):
            epochs[key].append(round(value, 6))
    return epochs


def table(results: Results) -> str:
    sizes = results["sizes"]
    cells = [
        [
            row["solver"],
            "the last epoch's states" if row["warm"] else "none",
            f"{row['sweeps'][0]:.1f}",
            f"{row['sweeps'][-1]:.1f}",
            f"{min(row['seconds'][1:] or row['seconds']):.3g} s",
            f"{row['losses'][-1]:.4f}",
        ]
        for row in good(results["rows"])
    ]
    head = ["solver", "guess", "sweeps, first epoch", "last epoch", "fastest epoch", "last loss"]
    about = (
        f"GRU of {sizes['n']} units, {sizes['samples']} samples of {sizes['T']} steps, batch {sizes['batch']}, "
        f"{sizes['epochs']} epochs; "
        f"{made_on(results['machine'])}."
    )
    return "\n".join([about, "", *markdown(head, cells, 2), *errors(results["rows"], ("solver", "warm"))]) + "\n"


def draw(results: Results, path: Path) -> None:
    drawn, axes = figure(9, 4.2, 1, 2)
    colours = dict(zip(SOLVERS, COLOURS, strict=False))
    for row in good(results["rows"]):
        style, label = ("-" if row["warm"] else ":"), f"{row['solver']}, {'warm' if row['warm'] else 'cold'}"
        axes[0][0].plot(
            range(1, 1 + len(row["sweeps"])), row["sweeps"], style, color=colours[row["solver"]], label=label
        )
        axes[0][1].plot(range(1, 1 + len(row["seconds"])), row["seconds"], style, color=colours[row["solver"]])
    axes[0][0].set(xlabel="epoch", ylabel="sweeps of a solve, mean", ylim=(0, None))
    axes[0][1].set(xlabel="epoch", ylabel="seconds of an epoch", ylim=(0, None))
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    sizes = results["sizes"]
    drawn.suptitle(
        f"{sizes['n']} units, T = {sizes['T']:,}, batch {sizes['batch']}; {made_on(results['machine'])}", fontsize=9
    )
    drawn.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__), arguments)
    sizes = FAST if options.fast else FULL
    rows = []
    for name, solver in SOLVERS.items():
        for warm in (False, True):
            if not options.clock.over:
                rows.append(
                    attempt({"solver": name, "warm": warm}, lambda s=solver, w=warm: train(s, w, sizes, options.device))
                )
    results = {"machine": facts(options.device), "sizes": sizes, "rows": rows}
    print(table(results))
    write(
        "warm" if options.device == "cpu" else f"warm_{options.device}",
        results,
        folder_of(options, __file__),
        table,
        draw,
    )


if __name__ == "__main__":
    main()
