"""A training step of cells whose kernels are generated from their step, beside one of `timeloom.GRU`, on this CPU.

    python -m benchmarks.own_cells                      # results/own-cells.json
    python -m benchmarks.own_cells --steps 4096 --batch 1 --cells LiGRU SLSTM

    python -m benchmarks.own_cells --threads 1 --clock cpu   # where others use the machine, too

Both take turns over the same input; the ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import timeloom
from timeloom.app.files import write_json
from timeloom.app.machine import LoadMeter

RESULTS = Path(__file__).parent / "results"
CELLS = (
    "CfC", "CTRNN", "MinimalGRU", "LiGRU", "SLSTM", "LayerNormGRU", "LayerNormLSTM", "PeepholeLSTM", "BlockGRU",
)  # fmt: skip
UNITS, INPUTS, TURNS = 64, 8, 7
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.own_cells", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--steps", nargs="+", type=int, default=(4096, 16384))
    parser.add_argument("--batch", nargs="+", type=int, default=(1, 16))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="wall: what one waits; cpu: what it computes")
    parser.add_argument("--out", type=Path, default=None, help="folder to store the results in")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    given = sys.argv[1:] if arguments is None else arguments
    meter, rows = LoadMeter(), []
    for steps in options.steps:
        for batch in options.batch:
            for name in options.cells:
                rows.append(measure(name, steps, batch, options.turns, CLOCKS[options.clock]))
                print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        facts = {
            "device": f"{options.threads} CPU thread(s)", "torch": str(torch.__version__),
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "command": " ".join(["python -m benchmarks.own_cells", *given]), "clock": options.clock,
            "load": asdict(meter.read()),
        }  # fmt: skip
        write_json(options.out / "own-cells.json", {**facts, "rows": rows})
    return 0


def measure(name: str, steps: int, batch: int, turns: int, clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Milliseconds of both directions in both layers, and the ratio of their sums."""
    torch.manual_seed(0)
    layers: dict[str, Any] = {
        "GRU": timeloom.GRU(INPUTS, UNITS),
        name: timeloom.Layer(getattr(timeloom.cells, name)(INPUTS, UNITS)),
    }
    x = torch.randn(steps, batch, INPUTS)
    for layer in layers.values():
        for _ in range(4):  # kernels are built, auto learns
            _step(layer, x, clock)
    times: dict[str, list[tuple[float, float]]] = {which: [] for which in layers}
    for _ in range(turns):
        for which, layer in layers.items():
            times[which].append(min((_step(layer, x, clock) for _ in range(2)), key=sum))
    ms = {
        which: [round(1e3 * statistics.median(t[i] for t in found), 2) for i in range(2)]
        for which, found in times.items()
    }
    ratio = statistics.median(sum(own) / sum(gru) for own, gru in zip(times[name], times["GRU"], strict=True))
    chunks = {
        which: [[r.chunk, r.warmup, r.iterations] for r in (report, report.backward)]
        for which, report in ((which, layer.reports[0]) for which, layer in layers.items())
    }
    return {
        "cell": name, "steps": steps, "batch": batch, "ratio": round(ratio, 2), "ms": ms,
        "chunk, warm-up, sweeps": chunks,
    }  # fmt: skip


def _step(layer: nn.Module, x: torch.Tensor, clock: Clock) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    begin = clock()
    loss = layer(x)[0].square().mean()
    middle = clock()
    loss.backward()
    return middle - begin, clock() - middle


if __name__ == "__main__":
    sys.exit(main())
