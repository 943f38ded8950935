"""`python -m benchmarks.small_calls --device cpu|cuda`: what a short call without gradients costs beside torch's layer.

Rollouts and step-by-step inference call a layer with 1 … 8 steps. There timeloom leaves the work to torch's layer, so
what is measured is the way there. Both layers are called in turn, in turns of a fraction of a millisecond, thousands of
times; the ratio is of the medians, and of the fastest turns beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from pathlib import Path

import torch
from torch import nn

import timeloom as tl
from benchmarks.fuzz.record import facts
from benchmarks.results import need_gpu

STEPS = (1, 2, 4, 8)
WIDTHS = (8, 32, 128)
HEAD = "| layer | n | T | torch µs | timeloom µs | ratio | of the fastest |\n|---|---|---|---|---|---|---|"
CALLS = 8
"""Calls in a turn."""


def turn(layer: nn.Module, x: torch.Tensor, hx: object) -> float:
    """Microseconds of a call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        layer(x, hx)
    if x.is_cuda:
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began) / CALLS


def measure(name: str, n: int, steps: int, device: str, turns: int) -> tuple[float, float, float, float]:
    """Medians of both in microseconds, torch's first, and their ratio by medians and by fastest turns."""
    theirs = getattr(nn, name)(n, n, device=device)
    ours = getattr(tl, name)(n, n, device=device)
    x, h = torch.randn(steps, 1, n, device=device), torch.zeros(1, 1, n, device=device)
    hx = (h, h) if name == "LSTM" else h
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for number in range(turns + 20):
            for side in (0, 1) if number % 2 else (1, 0):
                times[side].append(turn((theirs, ours)[side], x, hx))
    first, second = (part[20:] for part in times)
    medians = statistics.median(first), statistics.median(second)
    return *medians, medians[1] / medians[0], min(second) / min(first)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_calls", description="Short calls beside torch's.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=None, help="a page for the table")
    given = parser.parse_args()
    need_gpu(parser, given.device)
    torch.set_num_threads(1)
    about, rows = facts(given.device), list[str]()
    print(HEAD)
    for name, n, steps in product(("GRU", "LSTM", "RNN"), WIDTHS, STEPS):
        theirs, ours, ratio, fastest = measure(name, n, steps, given.device, given.turns)
        rows.append(f"| {name} | {n} | {steps} | {theirs:.1f} | {ours:.1f} | {ratio:.3f} | {fastest:.3f} |")
        print(rows[-1], flush=True)
    if given.out is not None:
        machine = about.get("gpu") or about["processor"]
        where = f"{about['date']}, {machine}, torch {about['torch']}, sources {about['code']}"
        words = (
            "Written by `python -m benchmarks.small_calls`: a call without gradients of batch 1, beside torch's layer."
        )
        given.out.write_text(
            f"# Small calls\n\n{words}\n{where}, {given.turns} turns each.\n\n{HEAD}\n" + "\n".join(rows) + "\n"
        )


if __name__ == "__main__":
    main()
