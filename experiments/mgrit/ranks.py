"""The multigrid paper's headline: one sequence over many processes, against the serial networks.

    python -m experiments.mgrit.ranks                              # T = 128 … 16,384 on 1, 2, 4, 8, 16 processes
    python -m experiments.mgrit.ranks --ranks 1 2 --steps 128 1024   # a part of it

Starts its own processes (torchrun, gloo, one thread each). Strong scaling: the length stays, the processes grow. The
implicit GRU by multigrid, as published and exact, forward and backward apart, beside torch's GRU and the implicit GRU
run serially; beside the times, how far states and gradients are from one process, what was sent, and a model of
the time that has not seen the longest sequence. On the largest number of processes, time is also shared with data.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    passes,
    save,
    torchrun,
    whole,
    write,
)  # fmt: skip
from experiments.mgrit.rank_worker import PATIENCE, WAYS, inputs_of, layer_of
from timeloom.solvers import Shooting, Solver

LENGTHS = tuple(2**k for k in range(7, 15))
RANKS = (1, 2, 4, 8, 16)
FULL = {"batch": 4, "inputs": 8, "hidden": 16, "turns": 5, "compared": 1024}
FAST = {"batch": 2, "inputs": 3, "hidden": 4, "turns": 1, "compared": 256}
SERIAL = {
    "implicit GRU, serial, compiled": "the same kernels as the ranks', in one chunk",
    "GRU, serial": "torch's layer",
    "implicit GRU, serial": "one step after the other in torch",
}
PAPER = 6.5
"""The largest speedup over the serial GRU that the paper reports: HMDB51, 128 frames."""


def serial(way: str, steps: int, sizes: dict[str, int], threads: int, clock: Clock) -> Results:
    """A network without any parallelism in time; torch may use its threads within a step."""
    torch.manual_seed(0)
    hidden, inputs = sizes["hidden"], sizes["inputs"]
    solver: Solver | str = Shooting(chunk=steps) if way.endswith("compiled") else "sequential"
    layer = nn.GRU(inputs, hidden) if way.startswith("GRU") else layer_of(solver, inputs, hidden)
    x = inputs_of(steps, sizes["batch"], inputs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    taken: list[tuple[float, float]] = []
    try:
        for _ in range(sizes["turns"] + 1):
            taken.append(passes(lambda: layer(x)[0].square().sum()))
            slow = sum(taken[-1]) > 1e3 * PATIENCE
            if (slow and not way.endswith("compiled")) or (len(taken) > 1 and (slow or clock.over)):
                break
    finally:
        torch.set_num_threads(before)
    taken = taken[1:] or taken  # the first one warms up
    return {
        "forward_ms": min(pair[0] for pair in taken),
        "backward_ms": min(pair[1] for pair in taken),
        "both_ms": min(sum(pair) for pair in taken),
    }


def parallel(
    ranks: int, time: int, lengths: Sequence[int], sizes: dict[str, int], clock: Clock, share: float
) -> list[Results]:
    """Rows of one number of processes, as far as its share of the time went; an error becomes a row."""
    seconds = 3600.0 if math.isinf(clock.left) else max(5.0, clock.left * share)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        arguments = ["--time", str(time), "--to", str(file), "--seconds", str(seconds)]
        arguments += [part for name, value in sizes.items() for part in (f"--{name}", str(value))]

        def run() -> Results:
            torchrun(
                "experiments.mgrit.rank_worker", ranks, [*arguments, "--lengths", *map(str, lengths)], seconds + 90
            )
            return {"measured": True}

        done = attempt({"ranks": ranks, "time_ranks": time}, run)
        rows = json.loads(file.read_text()) if file.exists() else []
    return rows + ([done] if "error" in done else [])


def pure(rows: list[Results]) -> list[Results]:
    """Rows in which all processes share one sequence."""
    return [row for row in good(rows) if row.get("time_ranks", 1) == row["ranks"]]


def best_serial(rows: list[Results], steps: int, way: str) -> Results | None:
    """The fastest run of a serial network at one length, over its numbers of threads."""
    fitting = [
        row for row in good(rows) if row["steps"] == steps and row["way"].startswith(way) and "serial" in row["way"]
    ]
    return min(fitting, key=lambda row: row["both_ms"], default=None)


def predict(rows: list[Results], way: str) -> list[Results]:
    """`o + γ T/R + σ T + collectives · exchange(R)`, fitted to all but the longest: what it says of all, and of that.

    o: a call; γ: what ranks share; σ: what they run one after the other (the coarsest level). Exchanges are measured.
    """
    points = [row for row in pure(rows) if row["way"] == way and "exchange_ms" in row]
    longest = max((row["steps"] for row in points), default=0)
    seen = [row for row in points if row["steps"] < longest]
    if len(seen) < 4:
        return []

    def talk(row: Results) -> float:
        return row["collectives"] * row["exchange_ms"]

    features = torch.tensor([[1.0, row["steps"] / row["ranks"], row["steps"]] for row in points], dtype=torch.float64)
    scale = torch.tensor([1 / row["both_ms"] for row in seen], dtype=torch.float64)
    rest = torch.tensor([max(row["both_ms"] - talk(row), 0.0) for row in seen], dtype=torch.float64)
    inside = [i for i, row in enumerate(points) if row["steps"] < longest]
    constants = torch.linalg.lstsq(features[inside] * scale[:, None], (rest * scale)[:, None]).solution.clamp(min=0)
    said = (features @ constants).flatten().tolist()
    return [
        {"way": way, "ranks": row["ranks"], "steps": row["steps"], "model_ms": value + talk(row),
         "ratio": (value + talk(row)) / row["both_ms"], "held_out": row["steps"] == longest}
        for row, value in zip(points, said, strict=True)
    ]  # fmt: skip


def table(results: Results) -> str:
    """A line for each length and way; speedups are over both serial networks."""
    rows, sizes, machine = results["rows"], results["sizes"], results["machine"]
    models = {(one["way"], one["ranks"], one["steps"]): one for way in WAYS for one in predict(rows, way)}
    lines = [
        f"Random inputs, {sizes['hidden']} units, batch {sizes['batch']}, {results['dtype']}; one thread a process. "
        f"{made_on(machine)}. "
        f"Milliseconds are the {results['statistic']} of {sizes['turns']} steps, the slowest process of each.",
        "",
    ]
    if machine.get("cores") and max((row["ranks"] for row in rows), default=1) > machine["cores"]:
        lines += [
            f"**More processes than the {machine['cores']} cores**: they take turns, and the times show that.",
            "",
        ]
    head = ["T", "way", "processes", "forward", "backward", "both", "over serial GRU", "over serial implicit GRU"]
    head += ["KiB sent", "model / measured", "states off by", "gradients off by"]
    cells = []
    for row in sorted(good(rows), key=lambda row: (row["steps"], row["way"], row["ranks"], row.get("time_ranks", 1))):
        ratios = []
        for way in ("GRU", "implicit GRU"):
            base = best_serial(rows, row["steps"], way)
            ratios.append(f"{base['both_ms'] / row['both_ms']:.2f}×" if base else "–")
        shape = (
            f"{row['ranks'] // row['time_ranks']} × {row['time_ranks']}"
            if row.get("time_ranks", 1) != row["ranks"]
            else row["ranks"]
        )
        model = models.get((row["way"], row["ranks"], row["steps"])) if row.get("time_ranks") == row["ranks"] else None
        told = f"{model['ratio']:.2f}{' (held out)' if model['held_out'] else ''}" if model else "–"
        parts = [
            f"{row[key]:.1f}" if row.get(key) is not None else "–" for key in ("forward_ms", "backward_ms", "both_ms")
        ]
        off = [f"{row[key]:.0e}" if key in row else "–" for key in ("states_off", "gradients_off")]
        sent = f"{row['kilobytes']:.1f}" if "kilobytes" in row else "–"
        cells.append([row["steps"], row["way"], shape, *parts, *ratios, sent, told, *off])
    lines += markdown(head, cells, 2)
    return "\n".join([*lines, *errors(rows, ("way", "steps", "ranks")), "", *verdict(results)]) + "\n"


def verdict(results: Results) -> list[str]:
    """The best speedups at the longest length, in words."""
    rows = results["rows"]
    longest = max((row["steps"] for row in pure(rows) if row["way"] in WAYS), default=0)
    lines = []
    for way in WAYS:
        here = [row for row in pure(rows) if row["way"] == way and row["steps"] == longest]
        if not here:
            continue
        best = min(here, key=lambda row: row["both_ms"])
        for base_way in ("GRU", "implicit GRU"):
            base = best_serial(rows, longest, base_way)
            if base:
                lines.append(
                    f"- T = {longest:,}: {way} takes {best['both_ms']:.0f} ms on {best['ranks']} process(es), "
                    f"{base['both_ms'] / best['both_ms']:.2f}× over the best serial {base_way} "
                    f"({base['both_ms']:.0f} ms, "
                    f"{base['way']}). The paper: up to {PAPER}× at 128 frames, over its serial GRU, on several nodes."
                )
    return lines


def draw(results: Results, path: Path) -> None:
    """Speedup over the serial GRU by processes, and the time of both passes by length."""
    rows = results["rows"]
    drawn, axes = figure(15, 4.4, 1, 3)
    lengths = sorted({row["steps"] for row in good(rows)})
    measured = any(best_serial(rows, steps, "implicit GRU") for steps in lengths)
    for axis, way in zip(axes[0], WAYS, strict=False):
        for number, steps in enumerate(lengths):
            alone = [row for row in pure(rows) if (row["way"], row["steps"], row["ranks"]) == (way, steps, 1)]
            base = best_serial(rows, steps, "implicit GRU") or next(iter(alone), None)
            here = sorted(
                (row["ranks"], row["both_ms"]) for row in pure(rows) if (row["way"], row["steps"]) == (way, steps)
            )
            if base and here:
                shade = str(0.8 * (1 - number / max(len(lengths) - 1, 1)))
                axis.loglog(
                    [r for r, _ in here],
                    [base["both_ms"] / ms for _, ms in here],
                    marker="o",
                    color=shade,
                    label=f"T = {steps:,}",
                    base=2,
                )
        axis.axhline(
            PAPER, color=COLOURS[0], linestyle="--", label=f"paper, at best: {PAPER}× (128 frames, over its serial GRU)"
        )
        axis.axhline(1.0, color=COLOURS[5], linewidth=0.7)
        axis.set(
            xlabel="processes",
            ylabel="over the best serial implicit GRU" if measured else "over one process",
            title=way,
        )
        axis.set_yscale("log", base=2)
        axis.legend(fontsize=6)
    right = axes[0][2]
    ranks = max((row["ranks"] for row in pure(rows)), default=1)
    chosen = [(way, ranks) for way in WAYS] + [
        (way, 1) for way in sorted({row["way"] for row in good(rows)} - set(WAYS))
    ]
    for colour, (way, count) in zip(COLOURS, chosen, strict=False):
        for key, style in (("forward_ms", ":"), ("backward_ms", "-")):
            here = sorted(
                (row["steps"], row[key])
                for row in good(rows)
                if (row["way"], row["ranks"]) == (way, count) and row.get(key) and row.get("time_ranks", 1) == count
            )
            label = f"{way}, {count} process(es)" if key == "backward_ms" else None
            right.loglog([t for t, _ in here], [ms for _, ms in here], style, color=colour, label=label, marker=".")
    right.set(xlabel="steps", ylabel="ms: dotted forward, solid backward", title="both passes apart")
    right.set_xscale("log", base=2)
    right.legend(fontsize=6)
    drawn.suptitle(
        f"{results['sizes']['hidden']} units, batch {results['sizes']['batch']}; {made_on(results['machine'])}",
        fontsize=9,
    )
    drawn.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--ranks", type=whole, nargs="+", help=f"processes (default: {RANKS})")
    parser.add_argument("--steps", type=whole, nargs="+", help=f"lengths (default: {LENGTHS})")
    parser.add_argument("--hidden", type=whole, help="units (default: 16)")
    parser.add_argument("--batch", type=whole, help="sequences (default: 4)")
    options = begin(parser, arguments)
    sizes = dict(FAST if options.fast else FULL)
    sizes |= {name: getattr(options, name) for name in ("hidden", "batch") if getattr(options, name)}
    ranks = options.ranks or ((2,) if options.fast else RANKS)
    lengths = sorted(options.steps or ((128, 256) if options.fast else LENGTHS))
    machine = facts()
    results: dict[str, Any] = {
        "machine": machine,
        "sizes": sizes,
        "dtype": "float32",
        "statistic": "fastest",
        "rows": [],
    }
    rows = results["rows"]
    folder = folder_of(options, __file__)
    jobs = [(count, count) for count in ranks]
    most = max(ranks)
    jobs += [(most, time) for time in (most // 2, most // 4) if time > 1 and most // time <= sizes["batch"]]
    for number, (count, time) in enumerate(jobs):
        if options.clock.over:
            break
        fair = [steps for steps in lengths if steps >= count]
        rows += parallel(count, time, fair, sizes, options.clock, 0.7 / (len(jobs) - number))
        save("ranks", results, folder)
    threads = sorted({1, min(os.cpu_count() or 1, 4)})
    for steps in reversed(lengths):  # the longest first: it counts most
        for way in SERIAL:
            for count in threads if way.startswith("GRU") else threads[:1]:
                if options.clock.over and steps != lengths[-1]:
                    continue
                label = way if count == 1 else f"{way}, {count} threads"
                rows.append(attempt({"way": label, "ranks": 1, "steps": steps},
                                    lambda w=way, s=steps, c=count: serial(w, s, sizes, c, options.clock)))  # fmt: skip
                save("ranks", results, folder)
    print(table(results))
    write("ranks", results, folder, table, draw)


if __name__ == "__main__":
    main()
