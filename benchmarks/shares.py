"""What a training step gains, and from what: the kernel alone, or parallel time too; fresh and trained weights.

    python -m benchmarks.shares                     # this CPU; results/shares-cpu.json and the picture shares.png
    python -m benchmarks.shares --device cuda       # a GPU; results/shares-cuda.json and the picture

Three ways over the same weights and input take turns: torch's layer, timeloom with all of time in one chunk (what the
kernel gives), and timeloom as it comes (what parallel time adds). All are called as usual, without CUDA graphs; each
turn on a GPU is eight steps in a row, as a training makes them, after 30 in which `auto` learns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.trained import trained_state
from timeloom.app.files import write_json
from timeloom.app.machine import NOTICEABLE, LoadMeter, counted
from timeloom.nn import parallelize
from timeloom.solvers import Shooting

RESULTS = Path(__file__).parent / "results"
STEPS, BATCH = 16384, 1
TURNS = {"cpu": 3, "cuda": 5}
LEARNS = {"cpu": 3, "cuda": 30}
"""Steps before timeloom's are timed: libraries load, kernels are built, `auto` learns."""
BLOCK = 8
"""Consecutive steps that a turn times on a GPU, as in training."""
CASES = {
    "cpu": (("GRU", 32), ("GRU", 128), ("LSTM", 32), ("LSTM", 128)),
    "cuda": (("GRU", 32), ("GRU", 128), ("GRU", 512), ("LSTM", 32), ("LSTM", 128)),
}
README = (
    ("cpu", "one CPU thread", "GRU", 32), ("cpu", "one CPU thread", "LSTM", 32), ("cuda", "H200", "GRU", 32),
    ("cuda", "H200", "GRU", 512),
)  # fmt: skip
WAYS = ("torch", "one chunk", "timeloom")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.shares", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    meter, rows = LoadMeter(), []
    for cell, units in CASES[options.device]:
        for weights in ("fresh", "trained"):
            rows.append(measure(cell, units, weights, options.device))
            print(json.dumps(rows[-1]), flush=True)
    facts = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else counted(options.threads, "CPU thread"),
        "torch": str(torch.__version__), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": f"python -m benchmarks.shares {_options(options)}", "load": asdict(meter.read()),
    }  # fmt: skip
    write_json(options.out / f"shares-{options.device}.json", {**facts, "rows": rows})
    print("\n".join(readme_rows(options.out)))
    draw(options.out)
    return 0


def readme_rows(folder: Path) -> list[str]:
    """The rows of the README's table: fresh and trained weights, and the kernel alone for both."""
    lines = []
    for name, device, cell, units in README:
        path = folder / f"shares-{name}.json"
        rows = json.loads(path.read_text())["rows"] if path.is_file() else []
        found = {row["weights"]: row["ratios"] for row in rows if (row["cell"], row["units"]) == (cell, units)}
        if found:
            both = {way: [_times(found[kind][way]) for kind in ("fresh", "trained")] for way in WAYS}
            cells = [f"{cell}, {device}", str(units), *both["timeloom"], ", ".join(both["one chunk"])]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×" if ratio >= 1 else f"{ratio:.2f}×"


def _options(options: argparse.Namespace) -> str:
    return "--device cuda" if options.device == "cuda" else f"--threads {options.threads}"


def measure(cell: str, units: int, weights: str, device: str) -> dict[str, Any]:
    """Milliseconds of a training step each way, and speedups over torch's."""
    torch.manual_seed(0)
    layer = (nn.LSTM if cell == "LSTM" else nn.GRU)(units, units)
    if weights == "trained":
        layer.load_state_dict(trained_state(cell, units))
    layer = layer.to(device)
    x = torch.randn(STEPS, BATCH, units, device=device)
    layers = {
        "torch": layer,
        "one chunk": parallelize(deepcopy(layer), Shooting(chunk=STEPS)),
        "timeloom": parallelize(deepcopy(layer)),
    }
    for way in WAYS:
        for _ in range(1 if way == "torch" else LEARNS[device]):
            _steps(layers[way], x, 1)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(TURNS[device]):
        for way in WAYS:
            times[way].append(_turn(layers[way], x, 1 if way == "torch" else 3))
    ms = {way: 1e3 * statistics.median(times[way]) for way in WAYS}
    ratios = {way: statistics.median(a / b for a, b in zip(times["torch"], times[way], strict=True)) for way in WAYS}
    return {"cell": cell, "units": units, "weights": weights, "ms": ms, "ratios": ratios}


def _turn(layer: nn.Module, x: torch.Tensor, times: int) -> float:
    """Seconds of a step: the fastest of several on a CPU; on a GPU the mean of consecutive ones."""
    return _steps(layer, x, BLOCK) if x.is_cuda else min(_steps(layer, x, 1) for _ in range(times))


def _steps(layer: nn.Module, x: torch.Tensor, count: int) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        layer.zero_grad()
        layer(x.detach().requires_grad_())[0].square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def draw(folder: Path) -> None:
    """Draw one panel per measured device: bars for the kernel, and for what parallel time adds; torch's layer is 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stored = [json.loads(p.read_text()) for p in (folder / f"shares-{d}.json" for d in ("cpu", "cuda")) if p.is_file()]
    height = 1.5 + 0.28 * max(len(run["rows"]) for run in stored)
    figure, panels = pyplot.subplots(
        1, len(stored), figsize=(5.2 * len(stored) + 1, height), layout="constrained", squeeze=False
    )
    for axes, run in zip(panels[0], stored, strict=True):
        rows, places = run["rows"], range(len(run["rows"]))
        kernel, whole = ([row["ratios"][way] for row in rows] for way in ("one chunk", "timeloom"))
        inner, thick = [min(pair) for pair in zip(kernel, whole, strict=True)], 0.62
        added = [w - k for k, w in zip(inner, whole, strict=True)]
        axes.barh(
            places, [k - 1 for k in inner], left=1, color="#0b6e99", height=thick, label="the kernel, in one chunk"
        )
        axes.barh(places, added, left=inner, color="#e08e45", height=thick, label="parallel time adds")
        for place, ratio in zip(places, whole, strict=True):
            axes.annotate(
                _times(ratio),
                (max(ratio, 1.0), place), textcoords="offset points", xytext=(5, 0), va="center", fontsize=9,
            )  # fmt: skip
        axes.axvline(1.0, color="#999999", linewidth=1.0, linestyle="--", label="torch's layer")
        axes.set_yticks(places, [f"{row['cell']} {row['units']}, {row['weights']}" for row in rows], fontsize=9)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(min(0.8, 0.9 * min(inner)), 2 * max(whole))
        axes.xaxis.set_major_formatter(lambda ratio, place: f"{ratio:g}×")
        axes.set_title(f"{run['device']}, torch {run['torch']}{_busy(run['load'])}", fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(f"A training step over {STEPS:,} steps of one sequence: times as fast as torch.nn", fontsize=11)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(folder / "shares.png", dpi=150, facecolor="white")
    pyplot.close(figure)


def _busy(load: dict[str, Any]) -> str:
    """A note if other work kept the machine busy."""
    others = load["others"] or 0.0
    return f", others on {others:.1f} of {load['cores']} cores" if others >= NOTICEABLE else ""


if __name__ == "__main__":
    sys.exit(main())
