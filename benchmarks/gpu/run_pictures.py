"""A picture of every whole training run: losses over wall-clock, and below them the decisions over the updates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

from benchmarks.gpu.compare import Row
from benchmarks.gpu.record import load, stem
from benchmarks.plot import GOAL, MET, MISSED

SIDES = (("torch", "torch", MISSED), ("timeloom", "timeloom", MET), ("warm", "with warm starts", GOAL))
PIECE = "runs"
MOST_TOLD = 6
"""Most decisions that are written out."""


def draw(folder: Path) -> list[Path]:
    """Pictures beside the JSON file, one for each run; the paths of those drawn."""
    path = folder / f"{stem(PIECE)}.json"
    content = load(path)
    if content is None:
        return []
    drawn = []
    for row in content["rows"]:
        if "timeloom" not in row:
            continue
        figure = picture(row)
        figure.supxlabel(f"{content['device']}, torch {content['torch']}", fontsize=8, color="#666666")
        target = path.with_name(f"{path.stem}-{slug(row['name'])}.png")
        figure.savefig(target, dpi=120, facecolor="white")
        pyplot.close(figure)
        drawn.append(target)
    return drawn


def slug(name: str) -> str:
    """A run's name as part of a file's."""
    plain = re.sub(r"(?<=\d),(?=\d)", "", name.lower()).replace("=", "")
    return re.sub(r"[^a-z0-9]+", "-", plain)


def picture(row: Row) -> Any:
    figure, (losses, sweeps, cuts) = pyplot.subplots(
        3, 1, figsize=(8.0, 9.0), layout="constrained", height_ratios=(2, 1, 1)
    )
    for key, label, color in SIDES:
        if key in row:
            seconds = row[key]["seconds"]
            losses.plot(seconds, row[key]["losses"], color=color, linewidth=1.2, label=f"{label}: {seconds[-1]:.1f} s")
    losses.set_xscale("log")
    losses.set_yscale("log")
    losses.set_xlabel("wall-clock in seconds, all of it (log)")
    losses.set_ylabel("loss (log)")
    losses.legend(frameon=False, fontsize=9)
    losses.set_title(f"{row['name']}: {row['ratio']:.1f}× over {row['updates']} updates", fontsize=11)
    ours = row["timeloom"]
    for place, label in ((0, "forward"), (1, "backward")):
        counted = [each[place] for each in ours["sweeps"]]
        sweeps.step(ours["told"], counted, where="post", label=label, color=(MET, MISSED)[place])
    sweeps.set_ylabel("sweeps")
    sweeps.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    sweeps.legend(frameon=False, fontsize=8)
    for key, _, color in SIDES[1:]:
        for place, style in ((0, "-"), (1, ":")):
            lengths = [max(each[place], 1) for each in row.get(key, {}).get("cuts", [])]
            label = f"{('chunk', 'warm-up')[place]}{', warm starts' if key == 'warm' else ''}"
            cuts.step(row[key].get("told", []), lengths, style, where="post", color=color, label=label)
    cuts.set_yscale("log")
    cuts.set_ylabel("steps, forward (log)")
    cuts.set_xlabel(_told(ours["decisions"]), fontsize=7, loc="left")
    low, high = cuts.get_ylim()
    cuts.set_ylim(low, high * (high / low) ** 0.35)  # room for the names of the lines
    cuts.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
    for place in (losses, sweeps, cuts):
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    return figure


def _told(decisions: dict[str, str]) -> str:
    """The decisions, and at which update each was made."""
    told = [f"update {int(at) + 1}: {reason}" for at, reason in decisions.items()]
    shown = told if len(told) <= MOST_TOLD else [*told[: MOST_TOLD - 1], "…", told[-1]]
    return "\n".join(["update (below: what was decided, and when)", *shown])
