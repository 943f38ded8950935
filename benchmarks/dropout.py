"""A training step with dropout inside the recurrence beside one of the plain layer.

    python -m benchmarks.dropout                                  # a table
    python -m benchmarks.dropout --threads 1 --out benchmarks/results
    python -m benchmarks.dropout --device cuda --out benchmarks/results

The layers take turns over the same input; a ratio is the median of the turns' ratios. On one thread of a CPU, the time
is the processor's: what others do on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import timeloom as tl
from timeloom.app.files import write_json
from timeloom.app.machine import LoadMeter

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight_dropout=0.3": {"weight_dropout": 0.3},
    "recurrent_dropout=0.3": {"recurrent_dropout": 0.3},
    "zoneout=0.1": {"zoneout": 0.1},
}
SIZES = ((4096, 1, 32), (4096, 8, 32), (4096, 1, 64), (4096, 8, 64), (1024, 8, 128))
"""Steps, batch, and units, which are as many as inputs."""
WARM = {"cpu": 4, "cuda": 40}
"""Calls before the first turn: kernels are built and warm-ups learned; on a GPU plans settle and are recorded."""


def seconds(layer: Any, x: torch.Tensor) -> float:
    """Seconds of a forward and backward pass."""
    clock = time.process_time if x.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    layer.zero_grad()
    begin = clock()
    loss = layer(x)[0].square().mean()
    loss.backward()
    loss.item()  # waits for the device
    return clock() - begin


def measure(kind: str, size: tuple[int, int, int], device: str, turns: int) -> dict[str, Any]:
    steps, batch, units = size
    torch.manual_seed(0)
    x = torch.randn(steps, batch, units, device=device)
    layers = {name: getattr(tl, kind)(units, units, device=device, **given) for name, given in OPTIONS.items()}
    for layer in layers.values():
        for _ in range(WARM[x.device.type]):
            seconds(layer, x)
    times = [{name: seconds(layer, x) for name, layer in layers.items()} for _ in range(turns)]
    plain = 1e3 * statistics.median(turn["plain"] for turn in times)
    row = {"layer": kind, "steps": steps, "batch": batch, "units": units, "plain_ms": round(plain, 2)}
    for name in list(OPTIONS)[1:]:
        row[name] = round(statistics.median(turn[name] / turn["plain"] for turn in times), 2)
    row["kernels"] = layers["zoneout=0.1"].reports[0].reason.split("; ")[-1]
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.dropout", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="folder to store the results in")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    meter, rows = LoadMeter(), []
    names = ["layer", "T", "B", "n", "plain, ms", *[f"`{name}`" for name in list(OPTIONS)[1:]]]
    lines = ["| " + " | ".join(names) + " |", "|---" + "|--:" * (len(names) - 1) + "|"]
    print("\n".join(lines))
    for kind in ("GRU", "LSTM", "RNN"):
        for size in SIZES:
            row = measure(kind, size, options.device, options.turns)
            rows.append(row)
            lines.append("| " + " | ".join(str(value) for key, value in row.items() if key != "kernels") + " |")
            print(lines[-1], flush=True)
    if options.out is not None:
        facts = {"device": options.device, "threads": options.threads, "torch": str(torch.__version__)}
        load = asdict(meter.read())
        write_json(options.out / f"dropout-{options.device}.json", {**facts, "load": load, "rows": rows})
        busy = "unknown" if load["others"] is None else f"{load['others']:.1f} of {load['cores']} cores"
        command = f"python -m benchmarks.dropout --device {options.device} --threads {options.threads}"
        where = f"{torch.cuda.get_device_name()}, " if options.device == "cuda" else ""
        head = f"`{command}`; {where}torch {torch.__version__}; others used {busy}."
        title = "# Dropout inside the recurrence, times the plain layer's training step"
        text = "\n".join([title, "", head, "", *lines, ""])
        (options.out / f"dropout-{options.device}.md").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
