"""What `experiments.mgrit.ranks` has measured, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.harness import COLOURS, Results, figure, good, made_on
from experiments.mgrit.rank_report import (
    PAPER,
    best_alone,
    best_serial,
    most_processes,
    pure,
    shared_with_data,
)
from experiments.mgrit.rank_worker import WAYS

FRAMES = 128
"""Steps of the paper's sequences."""
BASES = {
    "torch's serial GRU": lambda rows, steps: best_serial(rows, steps, "GRU"),
    "the best serial run of the same network": lambda rows, steps: best_serial(rows, steps, "implicit GRU"),
    "its best on one process, chunks side by side": best_alone,
}


def draw(results: Results, path: Path) -> None:
    """By length: three speedups, all times, both passes, groups that share data; by processes, for each way. Of one
    length alone: bars.
    """
    rows, sizes = results["rows"], results["sizes"]
    about = f"{sizes['hidden']} units, batch {sizes['batch']}; {made_on(results['machine'])}"
    if len({row["steps"] for row in good(rows)}) == 1:
        _bars(rows, about, path)
        return
    drawn, axes = figure(15, 9, 2, 3)
    (first, second, third), (fourth, fifth, sixth) = axes
    _speedups(first, rows)
    _by_processes(second, rows, WAYS[0], "implicit GRU")
    _by_processes(third, rows, WAYS[2], "implicit GRU")
    _times(fourth, rows)
    _passes(fifth, rows)
    _shared(sixth, rows)
    for axis in (first, fourth, fifth, sixth):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("steps T")
    drawn.suptitle(about, fontsize=10)
    drawn.savefig(path, dpi=100)


def _speedups(axis: Any, rows: list[Results]) -> None:
    here = most_processes(rows)
    for colour, (name, base_of) in zip(COLOURS[1:], BASES.items(), strict=False):
        pairs = [(row, base_of(rows, row["steps"])) for row in here]
        points = [(row["steps"], base["both_ms"] / row["both_ms"]) for row, base in pairs if base]
        axis.loglog([t for t, _ in points], [r for _, r in points], "o-", color=colour, label=f"over {name}")
    axis.plot(
        FRAMES, PAPER, "*", color=COLOURS[0], markersize=14, label=f"paper, at best: {PAPER}× over its serial GRU"
    )
    axis.axhline(1.0, color="grey", linewidth=0.7)
    count = here[0]["ranks"] if here else 1
    axis.set(ylabel="times as fast, forward + backward", title=f"{WAYS[0]} on {count} processes")
    axis.set_ylim(top=axis.get_ylim()[1] * 30)  # room for the names of the lines
    axis.legend(fontsize=8, loc="upper left")


def _by_processes(axis: Any, rows: list[Results], way: str, base_way: str) -> None:
    lengths = sorted({row["steps"] for row in good(rows)})
    for number, steps in enumerate(lengths):
        base = best_serial(rows, steps, base_way)
        here = sorted(
            (row["ranks"], row["both_ms"]) for row in pure(rows) if (row["way"], row["steps"]) == (way, steps)
        )
        if base and here:
            share = number / max(len(lengths) - 1, 1)
            ratios = [base["both_ms"] / ms for _, ms in here]
            axis.loglog([r for r, _ in here], ratios, "o-", color=_shade(share), label=f"T = {steps:,}", base=2)
    axis.axhline(1.0, color="grey", linewidth=0.7)
    axis.set(xlabel="processes", ylabel=f"times as fast as the best serial {base_way}", title=way)
    axis.set_yscale("log", base=2)
    axis.legend(fontsize=7, ncols=2)


def _shade(share: float) -> tuple[float, float, float, float]:
    from matplotlib import colormaps

    return colormaps["viridis"](0.92 * (1 - share))


def _times(axis: Any, rows: list[Results]) -> None:
    """Of both passes: each way on its most processes, and one process."""
    lines = [(way, lambda steps, way=way: _most(rows, way, steps)) for way in WAYS]
    lines += [(name, lambda steps, base=base: base(rows, steps)) for name, base in BASES.items()]
    for number, (name, row_of) in enumerate(lines):
        found = [row for steps in sorted({row["steps"] for row in good(rows)}) if (row := row_of(steps))]
        style = "o-" if name in WAYS else "s:"
        counts = sorted({row["ranks"] for row in found})
        label = f"{name}, {counts[0]} … {counts[-1]} processes" if name in WAYS and len(counts) > 1 else name
        label += f", {counts[0]} processes" if name in WAYS and len(counts) == 1 else ""
        axis.loglog([row["steps"] for row in found], [row["both_ms"] for row in found], style, color=COLOURS[number],
                    markersize=4, label=label)  # fmt: skip
    axis.set(ylabel="ms, forward + backward", title="times, each on its most processes")
    axis.set_ylim(top=axis.get_ylim()[1] * 30)  # room for the names of the lines
    axis.legend(fontsize=7, loc="upper left")


def _most(rows: list[Results], way: str, steps: int) -> Results | None:
    here = [row for row in pure(rows) if (row["way"], row["steps"]) == (way, steps) and row["ranks"] > 1]
    return max(here, key=lambda row: row["ranks"], default=None)


def _passes(axis: Any, rows: list[Results]) -> None:
    here = most_processes(rows)
    lines = [(f"{WAYS[0]}, {here[0]['ranks']} processes", here)] if here else []
    for name in list(BASES)[:2]:
        found = [row for one in here if (row := BASES[name](rows, one["steps"]))]
        lines.append((name, found))
    for colour, (name, found) in zip(COLOURS, lines, strict=False):
        for key, style in (("forward_ms", "o:"), ("backward_ms", "o-")):
            words = key.removesuffix("_ms")
            axis.loglog([row["steps"] for row in found], [row[key] for row in found], style, color=colour, markersize=4,
                        label=f"{name}, {words}")  # fmt: skip
    axis.set(ylabel="ms", title="both passes apart")
    axis.set_ylim(top=axis.get_ylim()[1] * 30)
    axis.legend(fontsize=7, loc="upper left")


def _shared(axis: Any, rows: list[Results]) -> None:
    for colour, ((groups, time), points) in zip(COLOURS, shared_with_data(rows).items(), strict=False):
        label = f"batch in {groups}, time in {time}"
        axis.loglog([t for t, _ in points], [ms for _, ms in points], "o-", color=colour, label=label)
    count = max((row["ranks"] for row in good(rows)), default=1)
    axis.set(ylabel="ms, forward + backward", title=f"{WAYS[0]}, {count} processes share time and data")
    axis.set_yscale("log", base=2)
    axis.legend(fontsize=8)


def _bars(rows: list[Results], about: str, path: Path) -> None:
    """Both passes of every row, the fastest on top; one process in another colour. A × B processes: A groups share the
    batch, and B processes of each share time.
    """
    here = sorted(good(rows), key=lambda row: -row["both_ms"])
    drawn, axes = figure(9, 0.36 * len(here) + 1.4)
    axis, names = axes[0][0], []
    for row in here:
        time = row.get("time_ranks")
        shape = f", {row['ranks'] // time} × {time} processes" if time not in (None, row["ranks"]) else ""
        if time and not shape:
            shape = f", {time} process{'es' if time > 1 else ' of torchrun'}"
        names.append(row["way"] + shape)
    colours = [COLOURS[0] if row["ranks"] > 1 else COLOURS[1] for row in here]
    axis.barh(range(len(here)), [row["both_ms"] for row in here], color=colours)
    for place, row in enumerate(here):
        axis.text(row["both_ms"], place, f" {row['both_ms']:.0f}", va="center", fontsize=8)
    axis.set_yticks(range(len(here)), names, fontsize=8)
    axis.set(xlabel="ms, forward + backward")
    axis.margins(x=0.08)
    drawn.suptitle(f"T = {here[0]['steps']:,}; {about}", fontsize=9)
    drawn.savefig(path, dpi=100)
