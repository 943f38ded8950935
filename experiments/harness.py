"""What all experiments share: options, clocks, rows that outlive errors, files, pictures."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "experiments"
COLOURS = ("#c8553d", "#0b6e99", "#3f8f5f", "#e09f3e", "#6d4c9f", "#777777", "#111111", "#b56576")

Results = dict[str, Any]


# Options


def command(doc: str | None, gpu: bool = True) -> argparse.ArgumentParser:
    """The options that all experiments have; the first line of the script's text is its description.

    gpu: whether it has a part for GPUs; without one, `--device cuda` is refused, not ignored.
    """
    parser = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="all parts in small, in seconds")
    devices = ("cpu", "cuda") if gpu else ("cpu",)
    parser.add_argument("--device", choices=devices, default="cpu", help="where it runs (default: cpu)")
    parser.add_argument("--minutes", type=minutes, help="begin nothing new after so many (default: no limit)")
    parser.add_argument("--threads", type=whole, default=1, help="of torch on the CPU (default: 1)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, help="folder for the results (default: build/experiments/NAME)")
    where.add_argument("--store", action="store_true", help="replace the results that are kept beside the script")
    return parser


def begin(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options as given; the device is there, torch has its threads, and `clock` runs."""
    options = parser.parse_args(arguments)
    if options.fast and options.store:
        parser.error("--fast --store: results in small would take the place of measured ones; give --out FOLDER")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU on this machine; leave the option out to run on the CPU")
    if torch.get_num_threads() != options.threads:
        torch.set_num_threads(options.threads)
    options.clock = Clock(options.minutes)
    return options


def only_with_data(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Refuse what generated data have no use for, where --data is not given."""
    given = [name for name in names if getattr(options, name) != parser.get_default(name)]
    if options.data is None and given:
        parser.error(
            f"--{', --'.join(given)}: only with --data, and none is given; generated data have sizes of their own"
        )


def whole(text: str) -> int:
    """A number from 1 up, of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 up is needed, got {text!r}")
    return int(text)


def share(text: str) -> float:
    """A part of a whole, of the command line."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"a share from 0 to below 1 is needed, got {text!r}")
    return value


def minutes(text: str) -> float:
    """A time of the command line."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"minutes above 0 are needed, got {text!r}")
    return value


def rate(text: str) -> float:
    """A learning rate of the command line."""
    value = _number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"a learning rate above 0 and below 1 is needed, got {text!r}")
    return value


def _number(text: str) -> float:
    """NaN, which is in no range, if the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# Clocks


class Clock:
    """Time since the experiment began, and whether anything new may begin."""

    def __init__(self, minutes: float | None = None) -> None:
        self.began, self.limit = time.monotonic(), None if minutes is None else 60 * minutes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds until nothing new begins."""
        return float("inf") if self.limit is None else self.limit - self.seconds

    @property
    def over(self) -> bool:
        return self.left <= 0


def now(device: str = "cpu") -> float:
    """Seconds, when all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def passes(run: Callable[[], Tensor], device: str = "cpu") -> tuple[float, float]:
    """Milliseconds of a forward pass, which returns a loss, and of its backward pass."""
    began = now(device)
    loss = run()
    middle = now(device)
    loss.backward()
    return 1e3 * (middle - began), 1e3 * (now(device) - middle)


def in_turns(
    calls: Mapping[str, Callable[[], Sequence[float]]], turns: int, clock: Clock, warm: int = 1
) -> dict[str, list[Sequence[float]]]:
    """What each call returned in each turn, one after the other so that all meet the same load. `warm` turns first."""
    taken: dict[str, list[Sequence[float]]] = {name: [] for name in calls}
    for turn in range(warm + turns):
        for name, call in calls.items():
            measured = call()
            if turn >= warm:
                taken[name].append(measured)
        if clock.over and turn >= warm:
            break
    return taken


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"fastest": min(values), "median": statistics.median(values)}


def times(ratio: float) -> str:
    """How many times as fast, in three digits."""
    return f"{ratio:,.0f}×" if ratio >= 1000 else f"{ratio:.3g}×"


# Rows


def attempt(where: Results, run: Callable[[], Results]) -> Results:
    """A row: where it was measured, and what was found or the error in a line. Prints it."""
    try:
        row = {**where, **run()}
    except Exception as error:  # one case that fails must not cost the others
        row = {
            **where,
            "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}",
        }
    print(
        json.dumps({key: value for key, value in row.items() if not isinstance(value, list)}, default=str), flush=True
    )
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def good(rows: Iterable[Results]) -> list[Results]:
    """Rows without those that ended in an error."""
    return [row for row in rows if "error" not in row]


def errors(rows: Iterable[Results], keys: Sequence[str]) -> list[str]:
    """The rows that ended in an error, as lines of a page."""
    lines = [
        f"- {', '.join(f'{k} {row[k]}' for k in keys if k in row)}: {row['error']}" for row in rows if "error" in row
    ]
    return ["", "What did not run:", "", *lines] if lines else []


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A table; all columns but the first `left` ones are numbers."""
    lines = [f"| {' | '.join(head)} |", "| " + " | ".join(["---"] * left + ["--:"] * (len(head) - left)) + " |"]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]


# Files


def facts(device: str = "cpu") -> Results:
    """The machine, the day and the versions that a result belongs to."""
    return {
        "day": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "of_cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def made_on(machine: Results) -> str:
    """The machine in words, for pages and pictures."""
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    cores = f" of {machine['cores']} cores" if machine.get("cores") else ""
    all_cores = machine.get("of_cores", machine.get("cores"))
    on = f" on all {all_cores}" if all_cores != machine.get("cores") else ""
    load = f", load {machine['load']}{on} as it began" if machine.get("load") is not None else ""
    clock = f", {machine['clock']}" if machine.get("clock") else ""
    day = f", {machine['day']}" if machine.get("day") else ""
    return f"{machine['device']}, {threads}{cores}{load}, torch {machine['torch']}{clock}{day}"


def kept(path: Path, errors: bool = True, sizes: Results | None = None) -> Results:
    """The rows of a stored run to go on with, and `earlier`: how many of them were measured when and where.

    sizes: those of the run; rows of other sizes are not kept.
    """
    stored = json.loads(path.read_text()) if path.exists() else {}
    found = stored.get("sizes", stored)
    if not stored or any(found.get(name) != value for name, value in (sizes or {}).items()):
        return {"rows": [], "earlier": []}
    before, rows = stored.get("earlier", []), stored["rows"] if errors else good(stored["rows"])
    last = {"rows": len(rows) - sum(one["rows"] for one in before), "machine": stored["machine"]}
    return {"rows": rows, "earlier": [*before, last]}


def earlier_runs(results: Results) -> str:
    """Which rows are not of the run that the machine's line tells of, as a sentence; empty if all are."""
    told = [f"{one['rows']} on {made_on(one['machine'])}" for one in results.get("earlier", []) if one["rows"]]
    return f" Of earlier runs are the first rows that were measured: {'; '.join(told)}." if told else ""


def folder_of(options: argparse.Namespace, script: str) -> Path:
    """Where results go; the kept ones are replaced only with --store."""
    if options.store:
        return Path(script).with_name("results")
    path = Path(script)
    name = path.parent.name if path.stem == "run" else f"{path.parent.name}.{path.stem}"
    return options.out or BUILD / name


def save(name: str, results: Results, folder: Path) -> Path:
    """`name` with .json; lists of numbers in one line."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[\s\d.,e+-]+\]", lambda found: " ".join(found[0].split()), text)
    path = folder / f"{name}.json"
    path.write_text(text + "\n")
    return path


def write(
    name: str,
    results: Results,
    folder: Path,
    table: Callable[[Results], str],
    draw: Callable[[Results, Path], None],
) -> None:
    """`name` with .json, .md and, where matplotlib is installed, .png."""
    path = save(name, {**results, "made_by": [_named(table), _named(draw)]}, folder)
    path.with_suffix(".md").write_text(table(results))
    try:
        draw(results, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no picture: {error}; python -m experiments draw {path} draws it later")
    print(f"written: {path.with_suffix('')}.*", flush=True)


def _named(function: Callable[..., object]) -> tuple[str, str]:
    """Its module and name; a script that runs as `python -m` is called by the name it was given there."""
    module = function.__module__
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (spec.name if module == "__main__" and spec else module), function.__name__


# Pictures


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Any, Any]:
    """A figure and its axes, without a window."""
    from matplotlib.figure import Figure  # only here: a machine without it can measure

    drawn = Figure(figsize=(width, height), layout="constrained")
    return drawn, drawn.subplots(rows, columns, squeeze=False, **more)


def whole_numbers(axis: Any) -> None:
    """Ticks of an axis that counts, and has no halves."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def curve(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The loss of every step of `timeloom train`, and the seconds of training until then."""
    steps = list(rows)
    return {
        "losses": [round(row["loss"], 5) for row in steps],
        "elapsed": [round(row["elapsed"], 3) for row in steps],
    }


def plot_losses(runs: Mapping[str, Mapping[str, Any]], title: str, path: Path, accuracy: str | None = None) -> None:
    """Losses of all runs over steps and over time, and by epoch the list `accuracy` of those that have it, if named."""
    drawn, axes = figure(13 if accuracy else 9, 4.2, 1, 3 if accuracy else 2)
    for number, (label, run) in enumerate(runs.items()):
        # Curves lie upon one another: each is drawn thinner than the one below it.
        steps = [run.get("every", 1) * step for step in range(len(run["losses"]))]
        axes[0][0].plot(steps, run["losses"], label=label, linewidth=max(4 - number, 1), alpha=0.8)
        axes[0][1].plot(run["elapsed"], run["losses"], linewidth=1)
        if accuracy and accuracy in run:
            axes[0][2].plot(
                range(1, 1 + len(run[accuracy])), run[accuracy], marker=".", color=f"C{number}",
                linewidth=max(3 - number, 1),
            )  # fmt: skip
    axes[0][0].set(xlabel="training step", ylabel="loss")
    axes[0][1].set(xlabel="seconds of training", ylabel="loss", xscale="log")
    if accuracy:
        axes[0][2].set(xlabel="epoch", ylabel=accuracy.replace("_by_epoch", " on the test set").replace("_", " "))
        axes[0][2].set_xlim(0.5, None)
        whole_numbers(axes[0][2])
    whole_numbers(axes[0][0])
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    drawn.suptitle(title)
    drawn.savefig(path, dpi=100)
