"""Time of `linear_scan` by its methods, beside a sum of the same size: `python -m experiments.deer.scan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import timeloom as tl
from experiments.harness import (
    COLOURS,
    Clock,
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

CASES = [
    ("diagonal", 256, 1, 8),
    ("diagonal", 16384, 1, 8),
    ("diagonal", 16384, 16, 32),
    ("dense", 256, 1, 8),
    ("dense", 16384, 1, 8),
    ("dense", 16384, 1, 16),
    ("dense", 16384, 1, 20),
    ("dense", 16384, 1, 32),
    ("block", 16384, 1, 8),
]
METHODS = ("reference", "chunked", "blelloch", "auto")


def fastest(run: Callable[[], object], device: str, seconds: float) -> float:
    """Milliseconds of the fastest of several runs."""
    run()
    best, end = float("inf"), now(device) + seconds
    while best == float("inf") or now(device) < end:
        began = now(device)
        run()
        best = min(best, now(device) - began)
    return 1e3 * best


def measure(seconds: float, steps_most: int, device: str, clock: Clock) -> list[Results]:
    """A row for each case, as far as the time goes."""
    rows = []
    for structure, steps, batch, n in CASES:
        if clock.over:
            break
        steps = min(steps, steps_most)
        shape = {"diagonal": (), "dense": (n,), "block": ()}[structure]
        b = torch.randn(steps, batch, *([2] if structure == "block" else []), n, device=device)
        a = torch.rand(steps, batch, *([2, 2] if structure == "block" else []), n, *shape, device=device) / n
        where = {"elements": structure, "T": steps, "B": batch, "n": n}

        def run(structure: str = structure, a: Tensor = a, b: Tensor = b) -> Results:
            times = {
                m: fastest(lambda m=m: tl.linear_scan(a, b, structure=structure, method=m), device, seconds)
                for m in METHODS
            }
            return {**times, "sum": fastest(lambda: a + a, device, seconds)}

        rows.append(attempt(where, run))
    return rows


def table(results: Results) -> str:
    cells = [
        [row["elements"], f"{row['T']}, {row['B']}, {row['n']}", *(f"{row[name]:.3g} ms" for name in (*METHODS, "sum"))]
        for row in good(results["rows"])
    ]
    head = ["elements", "T, B, n", "loop", "chunked", "Blelloch", "auto", "one sum of the same size"]
    lines = [
        f"{made_on(results['machine'])}.",
        "",
        *markdown(head, cells, 2),
        *errors(results["rows"], ("elements", "T", "n")),
    ]
    return "\n".join(lines) + "\n"


def draw(results: Results, path: Path) -> None:
    drawn, axes = figure(8, 4.2)
    rows = good(results["rows"])
    labels = [f"{row['elements']}\n{row['T']}, {row['B']}, {row['n']}" for row in rows]
    for colour, name in zip(COLOURS, (*METHODS, "sum"), strict=False):
        words = {"reference": "loop", "sum": "one sum of the same size"}.get(name, name)
        axes[0][0].semilogy(labels, [row[name] for row in rows], "o", color=colour, label=words)
    axes[0][0].tick_params(axis="x", labelsize=7)
    axes[0][0].set(ylabel="ms", xlabel="elements; T, B, n", title=made_on(results["machine"]))
    axes[0][0].title.set_fontsize(8)
    drawn.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS) + 1, fontsize=8
    )
    drawn.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    options = begin(command(__doc__), arguments)
    rows = measure(*((0.01, 300) if options.fast else (0.5, 1 << 30)), options.device, options.clock)
    results = {"machine": facts(options.device), "rows": rows}
    write(
        "scan" if options.device == "cpu" else f"scan_{options.device}",
        results,
        folder_of(options, __file__),
        table,
        draw,
    )


if __name__ == "__main__":
    main()
