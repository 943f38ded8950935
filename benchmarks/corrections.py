"""`python -m benchmarks.corrections`: sweeps that trained networks need, by correction, forward / backward.

Chunks begin from a warm-up of one chunk; sweeps end when all jumps are below the tolerance and what they add up to is
below ten times that. Beside them the largest Lyapunov exponent of each network, and the steps after which a difference
has shrunk to 1e-6. Those of the networks that have no stored weights are trained first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo.memory import CORRECTIONS, remembered, sweeps, told
from benchmarks.zoo.networks import TORCHS, WEIGHTS, model_of, stored_weights
from benchmarks.zoo.tasks import TASKS


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.corrections", description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--weights", type=Path, default=WEIGHTS, help="file of state_dicts by the networks' names")
    options.add_argument("--minutes", type=float, default=30.0, help="no network is begun after so long")
    options.add_argument("--only", default="", help="networks whose name has this word")
    options.add_argument("--steps", type=int, default=8192)
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--chunks", type=int, nargs="+", default=[64, 256])
    options.add_argument("--tol", type=float, default=1e-4)
    options.add_argument("--out", default="build/zoo", help="folder for corrections-DEVICE.json and .md")
    given = options.parse_args(arguments)
    device, rows, began = torch.device(given.device), [], time.perf_counter()
    stored = stored_weights(given.weights)
    for network in (network for network in TORCHS if given.only in network.name):
        if time.perf_counter() - began > 60 * given.minutes:
            print(f"{network.name}: left out, {given.minutes:g} minutes were over")
            continue
        model = model_of(network, stored, device)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            x = model.features(TASKS[network.task].draw(given.steps, given.batch, generator).x.to(device))
        known = remembered(model.layer, x)
        for chunk in given.chunks:
            row = {"network": network.name, "chunk": chunk} | known
            row |= {"sweeps": sweeps(model.layer, x, chunk, given.tol)}
            print(line(row), flush=True)
            rows.append(row)
            save(rows, Path(given.out), device, given)  # after every row: a run that is stopped keeps its rows
    return 0


def line(row: dict[str, Any]) -> str:
    counts = ", ".join(f"{name} {text}" for name, text in told(row["sweeps"]).items())
    times = ", ".join(f"{name} {one['ms']:.1f}" for name, one in row["sweeps"].items())
    memory = "never" if row["memory"] is None else f"{row['memory']:,} steps"
    return f"{row['network']}, chunk {row['chunk']}, exponent {row['exponent']:+.2g}, {memory}: {counts}; ms: {times}"


def save(rows: list[dict[str, Any]], folder: Path, device: torch.device, given: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"corrections-{device.type}"
    target.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    columns = ("network", "exponent", "memory, steps", "chunk", *CORRECTIONS)
    lines = [columns, ("---",) * len(columns)]
    for row in rows:
        counts = told(row["sweeps"])
        memory = "never" if row["memory"] is None else f"{row['memory']:,}"
        first = (row["network"], f"{row['exponent']:+.2g}", memory, str(row["chunk"]))
        lines.append((*first, *(counts.get(name, "") for name in CORRECTIONS)))
    table = "".join(f"| {' | '.join(entries)} |\n" for entries in lines)
    where = f"T={given.steps}, B={given.batch}, tolerance {given.tol:g}, {device.type}, torch {torch.__version__}"
    target.with_suffix(".md").write_text(f"# Sweeps by correction\n\n{where}.\n{__doc__}\n{table}")


if __name__ == "__main__":
    raise SystemExit(main())
