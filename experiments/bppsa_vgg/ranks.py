"""BPPSA over workers: a gradient of the pruned VGG-11 on 1 … 16 processes, measured and modelled.

    python -m experiments.bppsa_vgg.ranks --minutes 4          # full width
    python -m experiments.bppsa_vgg.ranks --share 4 --batch 8  # a quarter of the channels

`chain_backward(group=…)` shares the products of every level of the scan over processes (torchrun, gloo, one thread
each). The model counts FLOPs alone: products of a level are dealt out in turn, and a level lasts as long as its busiest
worker. It knows nothing of exchanges, of writing Jacobians down or of the layers' own gradients, which every process
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.bppsa_vgg.rank_worker import LEVELS
from experiments.harness import (
    COLOURS,
    Results,
    begin,
    command,
    earlier_runs,
    errors,
    facts,
    figure,
    folder_of,
    good,
    kept,
    made_on,
    markdown,
    whole,
    write,
)  # fmt: skip
from experiments.processes import options_of, rows_of_processes

RANKS = (1, 2, 4, 8, 16)
FULL = {"share": 1, "batch": 2, "turns": 2}
FAST = {"share": 16, "batch": 2, "turns": 1}


def modelled(products: Sequence[Sequence[object]], workers: int) -> float:
    """FLOPs along the busiest path: levels one after the other, their products dealt out to workers in turn."""
    total, level, flops = 0.0, None, list[float]()
    for phase, at, cost in [*products, (None, None, 0.0)]:
        if (phase, at) != level or phase == "middle":
            total += max((sum(flops[worker::workers]) for worker in range(workers)), default=0.0)
            level, flops = (phase, at), []
        flops.append(float(cost))
    return total


def table(results: Results) -> str:
    sizes, rows = results["sizes"], sorted(good(results["rows"]), key=lambda row: (row["way"], row["ranks"]))
    alone = {row["way"]: row for row in reversed(rows)}  # the fewest processes of each
    cells = []
    for row in rows:
        base = alone[row["way"]]
        flops = modelled(row["products"], row["ranks"])
        model = f"{modelled(base['products'], base['ranks']) / flops:.2f}×" if flops else "–"
        speed = f"{base['ms'] / row['ms']:.2f}×"
        cells.append([row["way"], row["ranks"], f"{row['ms']:.0f} ms", speed, f"{flops / 1e6:.2f} M", model])
    head = [
        "scan",
        "processes",
        "a gradient",
        f"over {min((row['ranks'] for row in rows), default=1)}",
        "FLOPs, busiest path",
        "modelled",
    ]
    about = (
        f"VGG-11, 1/{sizes['share']} of its channels, 97 % pruned, batch {sizes['batch']} of generated images; one "
        "thread a process. "
        f"{made_on(results['machine'])}.{earlier_runs(results)}"
    )
    return "\n".join([about, "", *markdown(head, cells), *errors(results["rows"], ("ranks",))]) + "\n"


def draw(results: Results, path: Path) -> None:
    drawn, axes = figure(6, 4)
    rows = good(results["rows"])
    for colour, way in zip(COLOURS, LEVELS, strict=False):
        here = sorted((row for row in rows if row["way"] == way), key=lambda row: row["ranks"])
        if here:
            counts, base = [row["ranks"] for row in here], modelled(here[0]["products"], here[0]["ranks"])
            axes[0][0].plot(
                counts, [here[0]["ms"] / row["ms"] for row in here], "o-", color=colour, label=f"{way}, measured"
            )
            said = [base / modelled(row["products"], row["ranks"]) for row in here]
            axes[0][0].plot(counts, said, ":", color=colour, label=f"{way}, FLOPs alone")
    axes[0][0].set(
        xlabel="processes",
        ylabel="times as fast as the fewest processes",
        title=f"pruned VGG-11, 1/{results['sizes']['share']} of its channels, batch {results['sizes']['batch']}\n"
        f"{made_on(results['machine'])}",
    )
    axes[0][0].title.set_fontsize(8)
    counts = sorted({row["ranks"] for row in rows})
    axes[0][0].set_xscale("log", base=2)
    axes[0][0].set_xticks(counts, counts)
    axes[0][0].axhline(1.0, color="grey", linewidth=0.6)
    axes[0][0].legend(fontsize=7)
    drawn.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__, gpu=False)
    parser.add_argument("--ranks", type=whole, nargs="+", help=f"processes (default: {RANKS})")
    parser.add_argument("--share", type=whole, help="by what the channels are divided (default: 1)")
    parser.add_argument("--batch", type=whole, help="images (default: 2)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the folder already has")
    options = begin(parser, arguments)
    sizes = dict(FAST if options.fast else FULL)
    sizes |= {name: getattr(options, name) for name in ("share", "batch") if getattr(options, name)}
    machine, folder = facts(), folder_of(options, __file__)
    ranks = options.ranks or ((2,) if options.fast else RANKS)
    arguments = [*options_of(sizes), "--ranks", *map(str, ranks)]
    name = "ranks" if sizes in (FULL, FAST) else f"ranks_{sizes['share']}x{sizes['batch']}"
    results: Results = {"machine": machine, "sizes": sizes, "rows": []}
    if options.resume:
        results |= kept(folder / f"{name}.json", errors=False, sizes=sizes)
    results["rows"] = rows_of_processes(
        "experiments.bppsa_vgg.rank_worker",
        max(ranks),
        arguments,
        options.clock,
        folder / f"{name}.rows",
        results["rows"],
    )
    print(table(results))
    write(name, results, folder, table, draw)


if __name__ == "__main__":
    main()
