"""Pictures of the pieces' results, from their JSON files: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log10, nan
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import NullLocator

from benchmarks.gpu.compare import Row
from benchmarks.gpu.lists import GRID_BATCHES, GRID_HIDDENS, GRID_LENGTHS, LENGTH
from benchmarks.gpu.record import load, stem
from benchmarks.plot import GOAL, MET, MISSED, plain_numbers

LINES = (("graph_ratio", "in a CUDA graph", MET), ("ratio", "eager", MISSED))
DARK = 1.3
"""Power of ten above which a field of the heat map is dark, and its number white."""


def draw(folder: Path) -> list[Path]:
    """A picture beside every JSON file that has one; the paths of those drawn."""
    drawn = []
    for piece, picture in PICTURES.items():
        path = folder / f"{stem(piece)}.json"
        content = load(path)
        rows = [] if content is None else [row for row in content["rows"] if "ratio" in row and "n" in row]
        if content is None or not rows:
            continue
        figure = picture(rows)
        figure.supxlabel(f"{content['device']}, torch {content['torch']}", fontsize=8, color="#666666")
        figure.savefig(path.with_suffix(".png"), dpi=150, facecolor="white")
        pyplot.close(figure)
        drawn.append(path.with_suffix(".png"))
    return drawn


def _by_batch(rows: Sequence[Row]) -> Any:
    chosen = [row for row in rows if row["cell"] == "GRU" and row["T"] == LENGTH]
    batches = sorted({row["B"] for row in chosen})
    return _speedups({f"B = {batch}": [row for row in chosen if row["B"] == batch] for batch in batches})


def _by(key: str) -> Callable[[Sequence[Row]], Any]:
    def picture(rows: Sequence[Row]) -> Any:
        alone = [row for row in rows if row["B"] == 1]
        names = dict.fromkeys(row[key] for row in alone)
        return _speedups({name: [row for row in alone if row[key] == name] for name in names})

    return picture


def _speedups(panels: Mapping[str, Sequence[Row]]) -> Any:
    """Ratios over the units, a panel for each kind of rows, the goals as black marks."""
    count = len(panels)
    figure, axes = pyplot.subplots(
        1, count, figsize=(max(6.6, 1.6 + 3.0 * count), 4.0), sharey=True, layout="constrained", squeeze=False
    )
    for place, (title, rows) in zip(axes[0], panels.items(), strict=True):
        for key, label, color in LINES:
            points = sorted((row["n"], row[key]) for row in rows if key in row)
            if points:
                place.plot(*zip(*points, strict=True), "o-", color=color, label=label)
        goals = [(row["n"], row["goal"]) for row in rows if row["goal"] > 1]
        if goals:
            place.plot(*zip(*goals, strict=True), "_", color=GOAL, markersize=16, markeredgewidth=2, label="goal")
        place.axhline(1.0, color="#999999", linewidth=0.8, linestyle="--")
        place.set_xscale("log", base=2)
        place.set_yscale("log")
        widths = sorted({row["n"] for row in rows})
        place.set_xticks(widths, [str(width) for width in widths], fontsize=8)
        place.xaxis.set_minor_locator(NullLocator())
        place.set_xlabel("hidden units")
        place.set_title(title, fontsize=10)
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    plain_numbers(axes[0][0].yaxis)
    axes[0][0].set_ylabel("speed over cuDNN, times (log)")
    found: dict[str, Any] = {}
    for place in axes[0]:
        handles, labels = place.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(list(found.values()), list(found), loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(f"Forward + backward, T = {LENGTH:,}: timeloom's speed over cuDNN", fontsize=12)
    return figure


def _heat_map(rows: Sequence[Row]) -> Any:
    """Eager ratios: a panel for each number of units, lengths by batches; white is as fast as cuDNN."""
    ratios = {(row["n"], row["B"], row["T"]): row["ratio"] for row in rows}
    figure, axes = pyplot.subplots(
        1, len(GRID_HIDDENS), figsize=(3.1 * len(GRID_HIDDENS), 3.2), sharey=True, layout="constrained"
    )
    norm = TwoSlopeNorm(0.0, -0.3, 2.0)
    image: Any = None
    for place, hidden in zip(axes, GRID_HIDDENS, strict=True):
        field = [[ratios.get((hidden, batch, length)) for length in GRID_LENGTHS] for batch in GRID_BATCHES]
        powers = [[nan if value is None else log10(value) for value in line] for line in field]
        image = place.imshow(powers, cmap="RdBu", norm=norm, aspect="auto", origin="lower")
        place.set_facecolor("#dddddd")
        for down, line in enumerate(field):
            for across, value in enumerate(line):
                if value is not None:
                    color = "white" if log10(value) > DARK else "black"
                    text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
                    place.text(across, down, text, ha="center", va="center", fontsize=7, color=color)
        place.set_xticks(range(len(GRID_LENGTHS)), [str(length) for length in GRID_LENGTHS], fontsize=7, rotation=45)
        place.set_yticks(range(len(GRID_BATCHES)), [str(batch) for batch in GRID_BATCHES], fontsize=8)
        place.set_xlabel("T")
        place.set_title(f"n = {hidden}", fontsize=10)
    axes[0].set_ylabel("B")
    bar = figure.colorbar(image, ax=axes, ticks=[-0.3, 0, 1, 2])
    bar.ax.set_yticklabels(["0.5x", "1x", "10x", "100x"])
    figure.suptitle("Forward + backward, eager: timeloom's speed over cuDNN (grey: not measured)", fontsize=12)
    return figure


PICTURES: dict[str, Callable[[Sequence[Row]], Any]] = {
    "headline": _by_batch,
    "regimes": _by("regime"),
    "half": _by("dtype"),
    "grid": _heat_map,
}
