"""The backward pass of a GRU by scans of several numbers of levels: `python -m experiments.bppsa_bitstream.levels`.

Loss on every step, float32; beside them the chunked adjoint that `adjoint="same"` runs, and torch's layer. By the
clock, the fastest of several turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import timeloom as tl
from experiments.harness import (
    COLOURS,
    Results,
    begin,
    command,
    facts,
    figure,
    folder_of,
    in_turns,
    made_on,
    markdown,
    passes,
    write,
)  # fmt: skip
from timeloom.solvers import Shooting, Solver

FULL: Results = {"T": 16384, "n": (4, 8, 16), "turns": 7}
FAST: Results = {"T": 100, "n": (4,), "turns": 1}
LEVELS: dict[str, int | None] = {"default": None, "1": 1, "2": 2, "4": 4, "8": 8, "all": 30}
SOLVERS: dict[str, Solver | None] = {"torch": None, "chunked adjoint": Shooting()}
SOLVERS |= {f"scan, {name}": Shooting(adjoint="scan", adjoint_levels=count) for name, count in LEVELS.items()}


def measure(n: int, sizes: Results, options: object) -> dict[str, float]:
    """Milliseconds by way."""
    device, clock = options.device, options.clock
    torch.manual_seed(0)
    x = torch.randn(sizes["T"], 1, 4, device=device)
    layers = {
        name: (torch.nn.GRU(4, n) if solver is None else tl.GRU(4, n, solver=solver)).to(device)
        for name, solver in SOLVERS.items()
    }
    for gru in layers.values():
        gru.load_state_dict(layers["torch"].state_dict())
    calls = {name: lambda gru=gru: passes(lambda: gru(x)[0].square().mean(), device) for name, gru in layers.items()}
    taken = in_turns(calls, sizes["turns"], clock)
    return {name: min(pair[1] for pair in pairs) for name, pairs in taken.items()}


def table(results: Results) -> str:
    cells = [[row["n"], *(f"{row[name]:.3g} ms" for name in SOLVERS)] for row in results["rows"]]
    machine = made_on(results["machine"])
    about = f"GRU of n units on random inputs, T = {results['T']}, B = 1, backward pass alone. {machine}."
    return "\n".join([about, "", *markdown(["n", *SOLVERS], cells)]) + "\n"


def draw(results: Results, path: Path) -> None:
    drawn, axes = figure(6, 3.6)
    for colour, row in zip(COLOURS, results["rows"], strict=False):
        axes[0][0].semilogy(list(SOLVERS), [row[name] for name in SOLVERS], "o", color=colour, label=f"n = {row['n']}")
    axes[0][0].tick_params(axis="x", rotation=30)
    about = f"GRU, T = {results['T']:,}, B = 1; {made_on(results['machine'])}"
    axes[0][0].set(ylabel="backward pass, ms", xlabel="way; scans by the levels that multiply matrices", title=about)
    axes[0][0].title.set_fontsize(8)
    axes[0][0].legend()
    drawn.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__), arguments)
    sizes = FAST if options.fast else FULL
    rows = []
    for n in sizes["n"]:
        if not options.clock.over:
            rows.append({"n": n, **measure(n, sizes, options)})
            print(rows[-1], flush=True)
    results = {"machine": facts(options.device), "T": sizes["T"], "rows": rows}
    base = "levels" if options.device == "cpu" else f"levels_{options.device}"
    write(base, results, folder_of(options, __file__), table, draw)


if __name__ == "__main__":
    main()
