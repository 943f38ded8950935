"""The multigrid paper's time by preprocessor: a ResNet-18, 34 or 50, and the network behind it, by processes.

    python -m experiments.mgrit_hmdb51.nets                     # 1 and 2 processes; minutes
    python -m experiments.mgrit_hmdb51.nets --ranks 1 4 16 --size 240 --batch 4

Time is split over processes (torchrun, one thread each): each makes the features of its own frames, then all run one
training step of the implicit GRU by multigrid as published. Beside it one process makes all features and trains torch's
GRU. The nets have random weights, which changes no time, and frames are noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from experiments.harness import (
    COLOURS,
    Results,
    begin,
    command,
    errors,
    facts,
    figure,
    folder_of,
    good,
    made_on,
    markdown,
    passes,
    whole,
    write,
)  # fmt: skip
from experiments.mgrit_hmdb51.net_worker import FEATURES, SHAPES
from experiments.processes import options_of, rows_of_processes

NETS = ("resnet-18", "resnet-34", "resnet-50")
FULL = {"frames": 128, "size": 96, "batch": 2, "hidden": 64, "turns": 3}
FAST = {"frames": 8, "size": 32, "batch": 2, "hidden": 4, "turns": 1}
SERIAL = "GRU, serial"


def serial(rows: list[Results], sizes: dict[str, int]) -> list[Results]:
    """torch's GRU behind the features of one process."""
    torch.manual_seed(0)
    layer, x = nn.GRU(FEATURES, sizes["hidden"]), torch.randn(sizes["frames"], sizes["batch"], FEATURES)
    ms = min(sum(passes(lambda: layer(x)[0].square().sum())) for _ in range(sizes["turns"] + 2))
    alone = [row for row in good(rows) if row["ranks"] == min(one["ranks"] for one in good(rows))]
    return [{**row, "way": SERIAL, "network_ms": ms} for row in alone if row["ranks"] == 1]


def speedups(rows: list[Results]) -> dict[tuple[str, int], tuple[float, float]]:
    """By net and processes, over torch's GRU in one process: with features in every step, and with features kept."""
    base = {row["net"]: row for row in good(rows) if row["way"] == SERIAL}
    found = {}
    for row in good(rows):
        if row["way"] != SERIAL and row["net"] in base:
            one = base[row["net"]]
            whole_step = (one["features_ms"] + one["network_ms"]) / (row["features_ms"] + row["network_ms"])
            found[row["net"], row["ranks"]] = whole_step, one["network_ms"] / row["network_ms"]
    return found


def table(results: Results) -> str:
    rows, sizes, machine = results["rows"], results["sizes"], results["machine"]
    lines = [
        f"{sizes['frames']} frames of {sizes['size']} × {sizes['size']}, batch {sizes['batch']}, {sizes['hidden']} "
        f"units; noise and random weights; one thread a process. {made_on(machine)}. Milliseconds are the fastest of "
        f"{sizes['turns']} (features: of fewer where they take seconds), the slowest process of each.",
        "",
    ]
    ratios, cells = speedups(rows), []
    for row in sorted(good(rows), key=lambda row: (row["net"], row["ranks"], row["way"])):
        both = row["features_ms"] + row["network_ms"]
        pair = ratios.get((row["net"], row["ranks"])) if row["way"] != SERIAL else (1.0, 1.0)
        told = [f"{ratio:.2f}×" for ratio in pair] if pair else ["–", "–"]
        parts = [f"{value:.0f}" for value in (row["features_ms"], row["network_ms"], both)]
        cells.append([row["net"], row["way"], row["ranks"], *parts, *told])
    head = ["net", "network behind it", "processes", "features", "a training step", "both"]
    head += ["over the serial GRU", "with features kept"]
    lines += [*markdown(head, cells, 2), *errors(rows, ("net", "ranks"))]
    return "\n".join([*lines, "", "The paper: up to 6.5× over its serial GRU, by preprocessor."]) + "\n"


def draw(results: Results, path: Path) -> None:
    """Bars for each net and number of processes: features, and the training step behind them, which is far shorter."""
    rows = sorted(good(results["rows"]), key=lambda row: (row["net"], row["ranks"], row["way"]), reverse=True)
    drawn, axes = figure(11, 0.36 * len(rows) + 1.4, 1, 2, sharey=True)
    places, sizes = range(len(rows)), results["sizes"]
    for axis, key, colour, words in (
        (axes[0][0], "features_ms", COLOURS[1], f"features of {sizes['frames']} frames, batch {sizes['batch']}"),
        (axes[0][1], "network_ms", COLOURS[0], "a training step behind them"),
    ):
        axis.barh(places, [row[key] for row in rows], color=colour)
        for place, row in enumerate(rows):
            axis.text(row[key], place, f" {row[key]:,.0f}", va="center", fontsize=8)
        axis.set(xlabel="ms", title=words)
        axis.margins(x=0.16)
        axis.locator_params(axis="x", nbins=5)
    names = [
        f"{row['net']}, {row['way'].replace(', serial', '')}, {row['ranks']} process{'es' if row['ranks'] > 1 else ''}"
        for row in rows
    ]
    axes[0][0].set_yticks(list(places), names, fontsize=8)
    drawn.suptitle(f"{made_on(results['machine'])}; the paper: up to 6.5× over its serial GRU", fontsize=9)
    drawn.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__, gpu=False)
    parser.add_argument("--ranks", type=whole, nargs="+", help="processes (default: 1 2)")
    parser.add_argument("--nets", nargs="+", choices=tuple(SHAPES), help=f"(default: {' '.join(NETS)})")
    parser.add_argument("--size", type=whole, help="of a frame (default: 96; the paper: 240)")
    parser.add_argument("--batch", type=whole, help="clips (default: 2; the paper: 100)")
    options = begin(parser, arguments)
    sizes = dict(FAST if options.fast else FULL)
    sizes |= {name: getattr(options, name) for name in ("size", "batch") if getattr(options, name)}
    nets = options.nets or (("small",) if options.fast else NETS)
    machine, folder, ranks = facts(), folder_of(options, __file__), sorted(set(options.ranks or (1, 2)), reverse=True)
    arguments = [*options_of(sizes), "--ranks", *map(str, ranks), "--nets", *nets]
    rows = rows_of_processes(
        "experiments.mgrit_hmdb51.net_worker", max(ranks), arguments, options.clock, folder / "nets.rows"
    )
    results = {"machine": machine, "sizes": sizes, "rows": rows + serial(rows, sizes)}
    print(table(results))
    write("nets", results, folder, table, draw)


if __name__ == "__main__":
    main()
