"""The multigrid paper's headline: one sequence over many processes, against the serial networks.

    python -m experiments.mgrit.ranks                              # T = 128 … 16,384 on 1, 2, 4, 8, 16 processes
    python -m experiments.mgrit.ranks --ranks 1 2 --steps 128 1024   # a part of it
    python -m experiments.mgrit.ranks --steps 16384 --rounds 3     # all rows of one length three times, medians

Starts its own processes (torchrun, gloo, one thread each). Strong scaling: the length stays, the processes grow. The
implicit GRU by multigrid, exact, as published, and as published with as many levels as the length asks for, forward and
backward apart, beside torch's GRU and the implicit GRU run serially. Beside the times: how far states and gradients are
from one process, what was sent, and a model of the time that has not seen the longest sequence. The largest number of
processes also shares time with data: groups of them, each with a part of the batch. In `--rounds` every row is
measured so many times, one round of all rows after the other, and its times are the medians of the rounds' medians;
torch's serial GRU is timed over all steps then, and groups are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from experiments.harness import (
    Clock,
    Results,
    attempt,
    begin,
    command,
    facts,
    folder_of,
    kept,
    passes,
    save,
    summary,
    whole,
    write,
)  # fmt: skip
from experiments.mgrit.rank_picture import draw
from experiments.mgrit.rank_report import table
from experiments.mgrit.rank_worker import PATIENCE, WARM, inputs_of, layer_of, make_kernels, solver_of
from experiments.processes import options_of, rows_of_processes
from timeloom.solvers import Shooting, Solver

LENGTHS = tuple(2**k for k in range(7, 15))
RANKS = (1, 2, 4, 8, 16)
FULL = {"batch": 4, "inputs": 8, "hidden": 16, "turns": 5, "compared": 1024}
FAST = {"batch": 2, "inputs": 3, "hidden": 4, "turns": 1, "compared": 256}
THREADS = (1, 4, 16)
SERIAL_SHARE = 0.3
"""Of the time, at most, for one process."""
SCALED = 2048
"""Steps that torch's serial runs are timed over."""
ALONE = {
    "implicit GRU, serial, compiled": "the same kernels as the ranks', in one chunk",
    "exact multigrid, one process": "chunks side by side on its threads",
    "GRU, serial": "torch's layer",
    "implicit GRU, serial": "one step after the other in torch",
}
"""What one process does; by its threads, too, where that may help."""


class Alone:
    """One process. Torch's serial runs are timed over fewer steps and scaled where there are many: one timing serves
    all of them.
    """

    def __init__(self, sizes: dict[str, int], clock: Clock, rounds: int = 1) -> None:
        self.sizes, self.clock, self.kept = sizes, clock, dict[tuple[str, int, int], Results]()
        self.statistic, self.scaled = statistic_of(rounds), ["implicit GRU, serial", *["GRU, serial"] * (rounds == 1)]

    def __call__(self, way: str, steps: int, threads: int) -> Results:
        timed = min(steps, SCALED) if way in self.scaled else steps
        key = way, timed, threads
        if key not in self.kept:
            self.kept[key] = alone(way, timed, self.sizes, threads, self.clock, self.statistic)
        return {name: steps / timed * ms for name, ms in self.kept[key].items()} | {"scaled": steps > timed}


def statistic_of(rounds: int) -> str:
    """What is told of the turns of a row."""
    return "median" if rounds > 1 else "fastest"


def alone(way: str, steps: int, sizes: dict[str, int], threads: int, clock: Clock, statistic: str) -> Results:
    """Milliseconds of one process."""
    torch.manual_seed(0)
    hidden, inputs = sizes["hidden"], sizes["inputs"]
    solver: Solver | str = "sequential"
    if way.endswith("compiled"):
        solver = Shooting(chunk=steps)
    elif way.startswith("exact"):
        solver = solver_of("exact multigrid", steps)
    layer = nn.GRU(inputs, hidden) if way.startswith("GRU") else layer_of(solver, inputs, hidden)
    x = inputs_of(steps, sizes["batch"], inputs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    taken: list[tuple[float, float]] = []
    try:
        for _ in range(sizes["turns"] + WARM):
            taken.append(passes(lambda: layer(x)[0].square().sum()))
            spent = sum(map(sum, taken[1:])) > 1e3 * PATIENCE  # kernels may be made in the first turn
            if len(taken) > 1 and (spent or clock.over):
                break
    finally:
        torch.set_num_threads(before)
    taken = taken[WARM:] or taken[1:] or taken
    found = {"forward_ms": [a for a, _ in taken], "backward_ms": [b for _, b in taken], "both_ms": [*map(sum, taken)]}
    return {name: summary(values)[statistic] for name, values in found.items()}


def over_rounds(rows: Sequence[Results]) -> list[Results]:
    """One row for all rounds of a case: medians of its times, all that it took in `rounds_ms`."""
    cases: dict[tuple[Any, ...], list[Results]] = {}
    for row in rows:
        case = tuple(row.get(key) for key in ("way", "ranks", "time_ranks", "steps", "error"))
        cases.setdefault(case, []).append(row)
    merged = []
    for same in cases.values():
        row = {key: value for key, value in same[0].items() if key != "round"}
        for key in [key for key in row if key.endswith("_ms")]:
            row[key] = summary([one[key] for one in same])["median"]
        if "both_ms" in row:
            row["rounds_ms"] = [round(one["both_ms"], 3) for one in same]
        merged.append(row)
    return merged


def shapes_of(ranks: Sequence[int], batch: int) -> list[tuple[int, int]]:
    """Processes, and how many of them share a sequence: all of them; and of the most, fewer and fewer, as long as there
    are sequences for all groups.
    """
    most = max(ranks)
    halves = [most // 2**k for k in range(1, most.bit_length())]
    return [(count, count) for count in ranks] + [
        (most, time) for time in halves if len(torch.empty(batch).chunk(most // time)) == most // time
    ]


def serial(
    lengths: Sequence[int], sizes: dict[str, int], done: set[tuple[str, int]], clock: Clock, rounds: int = 1
) -> Iterator[Results]:
    """What one process does at all lengths, the longest first, since it counts most; a row each as they come."""
    threads, measured = [count for count in THREADS if count <= (os.cpu_count() or 1)], Alone(sizes, clock, rounds)
    for steps in reversed(lengths):
        for way in ALONE:
            for count in threads[:1] if way.endswith("GRU, serial") else threads:  # torch's: few numbers in a step
                label = way if count == 1 else f"{way}, {count} threads"
                if (label, steps) not in done and not clock.over:
                    where = {"way": label, "ranks": 1, "steps": steps}
                    yield attempt(where, lambda w=way, s=steps, c=count: measured(w, s, c))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__, gpu=False)
    parser.add_argument("--ranks", type=whole, nargs="+", help=f"processes (default: {RANKS})")
    parser.add_argument("--steps", type=whole, nargs="+", help=f"lengths (default: {LENGTHS})")
    parser.add_argument("--hidden", type=whole, help="units (default: 16)")
    parser.add_argument("--batch", type=whole, help="sequences (default: 4)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the folder already has")
    parser.add_argument("--rounds", type=whole, default=1, help="of all rows, whose medians count (default: 1)")
    options = begin(parser, arguments)
    if options.resume and options.rounds > 1:
        parser.error("--resume --rounds: rounds are of one run; leave one of the two out")
    sizes = dict(FAST if options.fast else FULL)
    sizes |= {name: getattr(options, name) for name in ("hidden", "batch") if getattr(options, name)}
    ranks = options.ranks or ((2,) if options.fast else RANKS)
    lengths = sorted(options.steps or ((128, 256) if options.fast else LENGTHS))
    machine = facts()
    results: dict[str, Any] = {
        "machine": machine,
        "sizes": sizes,
        "dtype": "float32",
        "statistic": statistic_of(options.rounds),
        "rounds": options.rounds,
        "rows": [],
    }
    folder = folder_of(options, __file__)
    name = "ranks" if sizes in (FULL, FAST) else f"ranks_{sizes['hidden']}x{sizes['batch']}"
    name += "_rounds" if options.rounds > 1 else ""
    if options.resume:
        results |= kept(folder / f"{name}.json", errors=False, sizes=sizes)
    rows = results["rows"]
    done = {(row["way"], row["steps"]) for row in rows if "time_ranks" not in row}
    if not options.fast:
        make_kernels(sizes["inputs"], sizes["hidden"])  # else the processes would wait for them
    share = Clock(None if options.minutes is None else SERIAL_SHARE * options.minutes)
    for turn in range(options.rounds):
        for row in serial(lengths, sizes, done, share, options.rounds):
            rows.append({**row, "round": turn} if options.rounds > 1 else row)
            save(name, results, folder)
    shapes = shapes_of(ranks, sizes["batch"] if options.rounds == 1 else 1)
    arguments = ["--shapes", *[f"{count}x{time}" for count, time in shapes], "--lengths", *map(str, lengths)]
    arguments += [*options_of(sizes), "--rounds", str(options.rounds), "--statistic", results["statistic"]]
    file = folder / f"{name}.rows"
    found = rows_of_processes("experiments.mgrit.rank_worker", max(ranks), arguments, options.clock, file, rows)
    results["rows"] = over_rounds(found) if options.rounds > 1 else found
    print(table(results))
    write(name, results, folder, table, draw)


if __name__ == "__main__":
    main()
