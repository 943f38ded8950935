"""Losses of trainings: read off their metrics, and drawn side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def curve(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The loss of every step of `timeloom train`, and the seconds of training until then."""
    steps = list(rows)
    return {
        "losses": [round(row["loss"], 5) for row in steps],
        "elapsed": [round(row["elapsed"], 3) for row in steps],
    }


def plot_losses(runs: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Losses of all runs over steps and over time; `runs` are curves by their labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for number, (label, run) in enumerate(runs.items()):
        # Curves lie upon one another: each is drawn thinner than the one below it.
        left.plot(run["losses"], label=label, linewidth=max(4 - number, 1), alpha=0.8)
        right.plot(run["elapsed"], run["losses"], linewidth=1)
    left.set(xlabel="training step", ylabel="loss")
    right.set(xlabel="seconds of training", xscale="log")
    left.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
