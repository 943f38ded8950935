"""`python -m benchmarks.zoo`: trained networks, torch's layer beside timeloom's, forward and backward, eager.

Every row: milliseconds of torch's layer, of ours in one chunk (the kernel alone) and as `auto` runs it (kernel and
time-parallelism), and the errors of all results against float64, as the largest of relative norms. Then the largest
Lyapunov exponent, the steps after which a difference has shrunk to 1e-6, and the sweeps, forward/backward, that each
correction takes over chunks of 256 steps until all jumps are below 1e-4 (`python -m benchmarks.corrections` has more).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks.zoo.memory import remembered, sweeps, told
from benchmarks.zoo.networks import ZOO, Model, Network, drawn, trained
from benchmarks.zoo.tasks import TASKS

CHUNK, TOLERANCE = 256, 1e-4
"""Of the sweeps by correction."""
MEMORY = ("exponent", "memory", "sweeps")
WARM_UP = 6
"""Calls before anything is timed: `auto` learns from the first ones."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", default="build/zoo", help="folder for trained-DEVICE.json and .md")
    options.add_argument("--only", default="", help="networks whose name has this word")
    options.add_argument("--minutes", type=float, default=8.0, help="no network is begun after so long")
    options.add_argument("--steps", type=int, default=0, help="measure at so many steps instead of each network's own")
    given = options.parse_args(arguments)
    device, began, rows = torch.device(given.device), time.perf_counter(), []
    for network in (network for network in ZOO if given.only in network.name):
        if time.perf_counter() - began > 60 * given.minutes:
            print(f"{network.name}: left out, {given.minutes:g} minutes are over")
            continue
        model, loss = trained(network, device)
        for steps, batch in network.sizes:
            row = measured(network, model, given.steps or steps, batch, device) | {"loss": loss}
            print(line(row), flush=True)
            rows.append(row)
    save(rows, device, Path(given.out))
    return 0


def measured(network: Network, model: Model, steps: int, batch: int, device: torch.device) -> dict[str, Any]:
    """Times and errors of one network at one size."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        x = model.features(drawn(TASKS[network.task], steps, batch, generator, device)[0])
    pull = torch.randn(steps, batch, network.units, generator=generator).to(device)
    weights, size = model.layer.state_dict(), (model.layer.input_size, network.units)

    def layer(kind: Any, **options: Any) -> Any:
        made = kind(*size, **options).to(device)
        made.load_state_dict(weights)
        return made

    torchs = layer(getattr(nn, network.layer))
    own, one_chunk = (layer(getattr(tl, network.layer), **options) for options in ({}, {"solver": ONE_CHUNK}))
    truth = results(layer(getattr(nn, network.layer)).double(), x.double(), pull.double())
    row: dict[str, Any] = {"network": network.name, "T": steps, "B": batch, "units": network.units}
    for name, module in (("torch", torchs), ("one chunk", one_chunk), ("auto", own)):
        first = clock(partial(results, module, x, pull))
        for _ in range(WARM_UP - 1):
            found = results(module, x, pull)
        row[f"{name} first ms"], row[f"{name} error"] = first, error(found, truth)
    contenders = {"torch": torchs, "one chunk": one_chunk, "auto": own}
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(5):  # side by side: one after the other in every round
        for name, module in contenders.items():
            rounds[name].append(clock(partial(results, module, x, pull)))
    row |= {f"{name} ms": statistics.median(times) for name, times in rounds.items()}
    row |= remembered(own, x) | {"sweeps": told(sweeps(own, x, CHUNK, TOLERANCE))}
    report = own.reports[0]
    row["forward"], row["backward"] = str(report).split("\n")[0], str(report.backward)
    return row


ONE_CHUNK = tl.solvers.Shooting(chunk=2**40, warmup=0)


def results(module: nn.Module, x: Tensor, pull: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = module(x)[0]
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], pull)]


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((ours.double() - exact).norm() / exact.norm()) for ours, exact in zip(found, truth, strict=True))


def clock(call: Callable[[], object]) -> float:
    """Milliseconds of a call, the GPU's work included."""
    wait()
    began = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - began)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['network']}, T={row['T']}, B={row['B']}: torch {row['torch ms']:.1f} ms, one chunk "
        f"{row['torch ms'] / row['one chunk ms']:.1f}x, auto {row['torch ms'] / row['auto ms']:.1f}x; error "
        f"{row['torch error']:.0e}, ours {row['auto error']:.0e}; {row['forward']}"
    )


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table, ratios beside torch's time."""
    alone, auto = (f"{row['torch ms'] / row[f'{name} ms']:.1f}×" for name in ("one chunk", "auto"))
    errors = (f"{row[f'{name} error']:.0e}" for name in ("torch", "auto"))
    return (
        row["network"],
        f"{row['T']:,}",
        str(row["B"]),
        f"{row['torch ms']:.2f}",
        alone,
        auto,
        *errors,
        f"{row['exponent']:+.2g}",
        "never" if row["memory"] is None else f"{row['memory']:,}",
        ", ".join(f"{name} {text}" for name, text in row["sweeps"].items()),
        row["forward"],
    )


def save(rows: list[dict[str, Any]], device: torch.device, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    where = f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}"
    target = folder / f"trained-{device.type}"
    target.with_suffix(".json").write_text(json.dumps({"where": where, "rows": rows}, indent=1) + "\n")
    ratios = [row["torch ms"] / row["auto ms"] for row in rows]
    columns = (
        "network",
        "T",
        "B",
        "torch, ms",
        "one chunk",
        "auto",
        "torch's error",
        "ours",
        "exponent",
        "memory",
        "sweeps",
        "forward",
    )
    lines = [columns, ("---",) * len(columns), *map(cells, rows)]
    table = "".join(f"| {' | '.join(entries)} |\n" for entries in lines)
    summary = f"Median {statistics.median(ratios):.1f}×, worst {min(ratios):.1f}×.\n" if ratios else ""
    text = f"# Trained networks\n\n{where}. `python -m benchmarks.zoo`.\n{__doc__}\n{table}\n{summary}"
    target.with_suffix(".md").write_text(text)
    print(target.with_suffix(".md"))


if __name__ == "__main__":
    raise SystemExit(main())
