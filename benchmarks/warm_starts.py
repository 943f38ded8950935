"""`python -m benchmarks.warm_starts`: trained networks that train on, with warm starts, without, and as `auto` decides.

Every network of the zoo goes on from its trained weights, by Adam at its own rate and at a hundredth of it, on a few
batches in turns. Three copies make every update, one after the other: without warm starts, with them always, and with
them as is decided from call to call. Sequences are of different lengths (`lengths=`), with which `auto` begins at
known states on a CPU, too, or have resets. Times are of forward passes, medians over the last third of the updates; in
all: the sum over all updates, with whatever was tried.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks.results import machine_facts
from benchmarks.zoo.networks import TORCHS, WEIGHTS, Model, Network, model_of, stored_weights
from benchmarks.zoo.tasks import TASKS, Batch
from timeloom.solve.recurrence import BEGUN

SIDES = ("without", "always", "decided")


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.warm_starts", description=__doc__)
    options.add_argument("--only", default="", help="networks whose name has this word")
    options.add_argument("--steps", type=int, default=8192)
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--pool", type=int, default=3, help="batches that are trained on in turns")
    options.add_argument("--updates", type=int, default=72)
    options.add_argument("--rates", type=float, nargs="+", default=[1.0, 0.01], help="shares of each network's rate")
    options.add_argument("--minutes", type=float, default=30.0, help="no network is begun after so long")
    options.add_argument("--weights", type=Path, default=WEIGHTS, help="file of state_dicts by the networks' names")
    options.add_argument("--out", default="build/zoo", help="folder for warm-starts-cpu.json and .md")
    given = options.parse_args(arguments)
    stored, rows, began = stored_weights(given.weights), [], time.perf_counter()
    for network in (network for network in TORCHS if given.only in network.name):
        for share in given.rates:
            if time.perf_counter() - began > 60 * given.minutes:
                print(f"{network.name}: left out, {given.minutes:g} minutes were over")
                continue
            stored.setdefault(network.name, model_of(network, stored, torch.device("cpu")).state_dict())
            rows.append(measure(network, stored, share, given))
            print(line(rows[-1]), flush=True)
            save(rows, Path(given.out), given)
    return 0


def measure(network: Network, stored: dict[str, Any], share: float, given: argparse.Namespace) -> dict[str, Any]:
    """All sides of one network at one rate, update by update."""
    task, generator = TASKS[network.task], torch.Generator().manual_seed(5)
    pool = [task.draw(given.steps, given.batch, generator) for _ in range(given.pool)]
    lengths = given.steps - 8 * torch.arange(given.batch)
    stores = {"without": None, "always": tl.WarmStarts(always=True), "decided": tl.WarmStarts()}
    sides = {name: Side(network, stored, share, store) for name, store in stores.items()}
    for update in range(given.updates):
        for name in SIDES if update % 2 else reversed(SIDES):
            place = update % given.pool
            sides[name].update(pool[place], lengths, [(place, b) for b in range(given.batch)])
    found = {name: side.content(2 * given.updates // 3) for name, side in sides.items()}
    base = found["without"]
    return {"network": network.name, "rate": share * network.rate, "moved": sides["without"].moved} | {
        name: side | {"ratio": base["ms"] / side["ms"], "in_all": base["seconds"] / side["seconds"]}
        for name, side in found.items()
    }


class Side:
    """A copy of the network, with times and reports of its updates."""

    def __init__(self, network: Network, stored: dict[str, Any], share: float, store: tl.WarmStarts | None) -> None:
        self.model: Model = model_of(network, stored, torch.device("cpu"))
        self.optimizer = torch.optim.Adam(self.model.parameters(), share * network.rate)
        self.store, self.seconds, self.reports = store, list[float](), list[Any]()
        self.before: dict[Any, Tensor] = {}
        self.moved = 0.0

    def update(self, batch: Batch, lengths: Tensor, samples: list[Any]) -> None:
        layer, x = self.model.layer, self.model.features(batch.x)
        marks: dict[str, Any] = {"lengths": lengths} if batch.resets is None else {"resets": batch.resets}
        began = time.perf_counter()
        with nullcontext() if self.store is None else self.store.batch(samples):
            y = layer(x, **marks)[0]
        self.seconds.append(time.perf_counter() - began)
        self.reports.append(layer.reports[0])  # type: ignore[index]
        if self.store is None:
            was = self.before.get(samples[0])
            self.moved = self.moved if was is None else float((y.detach() - was).abs().max() / was.abs().max())
            self.before[samples[0]] = y.detach()
        self.optimizer.zero_grad()
        self.model.loss_of(y, batch.answers).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def content(self, first: int) -> dict[str, Any]:
        reports = self.reports[first:]
        return {
            "ms": 1e3 * statistics.median(self.seconds[first:]),
            "seconds": sum(self.seconds),
            "sweeps": statistics.fmean(report.iterations for report in reports),
            "warmup": statistics.median(report.warmup for report in reports),
            "chunk": statistics.median(report.chunk for report in reports),
            "begun": statistics.fmean(BEGUN in report.reason for report in reports),
            "reason": reports[-1].reason,
        }


def line(row: dict[str, Any]) -> str:
    sides = "; ".join(
        f"{name} {row[name]['ms']:.1f} ms ({row[name]['sweeps']:.1f} sweeps, warm-up {row[name]['warmup']:.0f})"
        for name in SIDES
    )
    return f"{row['network']}, rate {row['rate']:.1g}, moved {row['moved']:.0e}: {sides}; {row['decided']['reason']}"


def save(rows: list[dict[str, Any]], folder: Path, given: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.warm_starts --steps {given.steps} --updates {given.updates}"
    content = {"command": command, "machine": machine_facts(), "rows": rows}
    (folder / "warm-starts-cpu.json").write_text(json.dumps(content, indent=1) + "\n")
    columns = {
        "network": lambda row: row["network"],
        "rate": lambda row: f"{row['rate']:.1g}",
        "states moved": lambda row: f"{row['moved']:.0e}",
        "ms without": lambda row: f"{row['without']['ms']:.1f}",
        "always": lambda row: f"{row['always']['ratio']:.2f}×",
        "decided": lambda row: f"{row['decided']['ratio']:.2f}×",
        "decided, in all": lambda row: f"{row['decided']['in_all']:.2f}×",
        "warm-up without": lambda row: f"{row['without']['warmup']:.0f}",
        "warm-up, always": lambda row: f"{row['always']['warmup']:.0f}",
        "sweeps without": lambda row: f"{row['without']['sweeps']:.1f}",
        "sweeps, always": lambda row: f"{row['always']['sweeps']:.1f}",
        "begun, of those decided": lambda row: f"{row['decided']['begun']:.0%}",
    }
    lines = [list(columns), ["---", *["--:"] * (len(columns) - 1)]]
    lines += [[told(row) for told in columns.values()] for row in rows]
    table = "".join(f"| {' | '.join(entries)} |\n" for entries in lines)
    (folder / "warm-starts-cpu.md").write_text(
        f"# Warm starts on a CPU\n\nCommand: `{command}`, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads.\n\n{__doc__}\n{table}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
