"""Pictures of the ratios: one row per case, or for a grid one panel per hidden size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.measure import Measurement

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

MET, MISSED, GOAL = "#0b6e99", "#c8553d", "#222222"
MOST_ROWS = 30


def plot(path: Path, measurements: Sequence[Measurement], facts: dict[str, Any]) -> None:
    """Draws the ratios of all cases on a log axis, with their goals."""
    draw = _rows if len(measurements) <= MOST_ROWS else _panels
    figure = draw(measurements)
    layers = " and ".join(sorted({measurement.case.cell for measurement in measurements}))
    figure.suptitle(f"{layers}, forward + backward on the CPU: timeloom's speed over torch.nn", fontsize=12)
    figure.supxlabel(
        f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}", fontsize=8, color="#666666"
    )
    figure.savefig(path, dpi=150, facecolor="white")
    pyplot.close(figure)


def _rows(measurements: Sequence[Measurement]) -> Any:
    """A bar for each case, in the list's order, with its goal as an upright mark."""
    height = 1.5 + 0.36 * len(measurements)
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    ratios = [measurement.ratio for measurement in measurements]
    places = range(len(measurements))
    left = min(0.5, 0.8 * min(ratios))
    colors = [MET if measurement.meets_goal else MISSED for measurement in measurements]
    axes.barh(places, [ratio - left for ratio in ratios], left=left, color=colors, height=0.62)
    for place, measurement in zip(places, measurements, strict=True):
        goal = measurement.case.goal
        axes.plot([goal, goal], [place - 0.42, place + 0.42], color=GOAL, linewidth=2, solid_capstyle="butt")
        axes.annotate(
            f"{measurement.ratio:.3g}x",
            (max(measurement.ratio, goal), place),
            textcoords="offset points",
            xytext=(6, 0),
            va="center",
            fontsize=9,
        )
    axes.plot([], [], color=GOAL, linewidth=2, label="goal")
    axes.axvline(1.0, color="#999999", linewidth=0.8, linestyle="--", label="as fast as torch")
    axes.set_yticks(places, [measurement.case.name for measurement in measurements], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    highest = max(max(ratios), *(measurement.case.goal for measurement in measurements))
    axes.set_xlim(left, 2.0 * highest)
    axes.set_xlabel("speed over torch.nn, times (log)")
    plain_numbers(axes.xaxis)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.55 / height), ncols=2)
    return figure


def _panels(measurements: Sequence[Measurement]) -> Any:
    """A panel for each hidden size: the ratio over the length, a line for each batch, the goal dashed."""
    hiddens = sorted({measurement.case.hidden for measurement in measurements})
    batches = sorted({measurement.case.batch for measurement in measurements})
    lengths = sorted({measurement.case.length for measurement in measurements})
    shades = matplotlib.colormaps["viridis"]
    figure, panels = pyplot.subplots(
        1, len(hiddens), figsize=(3.2 * len(hiddens), 4.2), sharey=True, layout="constrained", squeeze=False
    )
    for axes, hidden in zip(panels[0], hiddens, strict=True):
        for index, batch in enumerate(batches):
            line = sorted(
                (measurement.case.length, measurement.ratio)
                for measurement in measurements
                if (measurement.case.hidden, measurement.case.batch) == (hidden, batch)
            )
            shade = shades(0.92 * index / max(1, len(batches) - 1))
            axes.plot(
                [length for length, _ in line],
                [ratio for _, ratio in line],
                "o-",
                color=shade,
                label=f"B = {batch}",
                markersize=4.5,
                linewidth=1.4,
            )
        for goal in sorted({measurement.case.goal for measurement in measurements}):
            axes.axhline(goal, color=GOAL, linewidth=1, linestyle="--", label=f"goal {goal:g}x")
        axes.set_xscale("log", base=4)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
        axes.set_xlabel("steps T")
        axes.set_title(f"n = {hidden}", fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if max(measurement.ratio for measurement in measurements) < 20:
        panels[0][0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plain_numbers(panels[0][0].yaxis)
    panels[0][0].set_ylabel("speed over torch.nn, times (log)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    return figure


def plain_numbers(axis: Axis) -> None:
    """Ratios as 10x, not as powers."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.set_minor_formatter(NullFormatter())
