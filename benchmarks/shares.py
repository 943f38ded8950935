"""What a training step gains, and from what: the kernel alone, or parallel time too; fresh and trained weights.

    python -m benchmarks.shares                     # this CPU; results/shares-cpu.json and the picture shares.png
    python -m benchmarks.shares --device cuda       # a GPU; results/shares-cuda.json and the picture

Three ways over the same weights and input take turns: torch's layer, timeloom with all of time in one chunk (what the
kernel gives), and timeloom as it comes (what parallel time adds). All are called as usual, without CUDA graphs.
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
from timeloom.app.machine import LoadMeter
from timeloom.nn import parallelize
from timeloom.solvers import Shooting

RESULTS = Path(__file__).parent / "results"
STEPS, BATCH = 16384, 1
TURNS = {"cpu": 3, "cuda": 15}
CASES = {
    "cpu": (("GRU", 32), ("GRU", 128), ("LSTM", 32), ("LSTM", 128)),
    "cuda": (("GRU", 32), ("GRU", 128), ("GRU", 512), ("LSTM", 32), ("LSTM", 128)),
}
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
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} CPU thread(s)",
        "torch": str(torch.__version__), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": f"python -m benchmarks.shares --device {options.device}", "load": asdict(meter.read()),
    }  # fmt: skip
    write_json(options.out / f"shares-{options.device}.json", {**facts, "rows": rows})
    draw(options.out)
    return 0


def measure(cell: str, units: int, weights: str, device: str) -> dict[str, Any]:
    """Milliseconds of a training step in each way, and how many times as fast as torch's."""
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
        for _ in range(1 if way == "torch" else 3):  # libraries load, kernels are built, auto learns
            _step(layers[way], x)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(TURNS[device]):
        for way in WAYS:
            times[way].append(min(_step(layers[way], x) for _ in range(1 if way == "torch" else 3)))
    ms = {way: 1e3 * statistics.median(times[way]) for way in WAYS}
    ratios = {way: statistics.median(a / b for a, b in zip(times["torch"], times[way], strict=True)) for way in WAYS}
    return {"cell": cell, "units": units, "weights": weights, "ms": ms, "ratios": ratios}


def _step(layer: nn.Module, x: torch.Tensor) -> float:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    begin = time.perf_counter()
    layer(x)[0].square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def draw(folder: Path) -> None:
    """One panel a device that was measured: bars for the kernel, and what parallel time adds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stored = [json.loads(p.read_text()) for p in (folder / f"shares-{d}.json" for d in ("cpu", "cuda")) if p.is_file()]
    height = 1.2 + 0.3 * len(stored[0]["rows"])
    figure, panels = pyplot.subplots(
        1, len(stored), figsize=(5.2 * len(stored) + 1, height), layout="constrained", squeeze=False
    )
    for axes, run in zip(panels[0], stored, strict=True):
        rows = run["rows"]
        kernel, whole = ([row["ratios"][way] for row in rows] for way in ("one chunk", "timeloom"))
        places = range(len(rows))
        left = min(0.5, 0.8 * min(*kernel, *whole))
        axes.barh(
            places, [w - left for w in whole], left=left, color="#e08e45", height=0.62, label="parallel time adds"
        )
        inner = [min(k, w) - left for k, w in zip(kernel, whole, strict=True)]
        axes.barh(places, inner, left=left, color="#0b6e99", height=0.62, label="the kernel, in one chunk")
        for place, ratio in zip(places, whole, strict=True):
            axes.annotate(
                f"{ratio:.3g}×", (ratio, place), textcoords="offset points", xytext=(5, 0), va="center", fontsize=9
            )
        axes.axvline(1.0, color="#999999", linewidth=0.8, linestyle="--", label="as fast as torch")
        axes.set_yticks(places, [f"{row['cell']} {row['units']}, {row['weights']}" for row in rows], fontsize=9)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(left, 3 * max(whole))
        axes.set_title(f"{run['device']}, torch {run['torch']}", fontsize=10)
        axes.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"A training step over {STEPS:,} steps, one sequence: times as fast as torch.nn", fontsize=11)
    figure.savefig(folder / "shares.png", dpi=150, facecolor="white")
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
