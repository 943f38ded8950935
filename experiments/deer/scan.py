"""Time of `linear_scan` by its methods, beside a sum of the same size: `python -m experiments.deer.scan`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

import timeloom as tl

RESULTS = Path(__file__).with_name("results")
CASES = [
    ("diagonal", 256, 1, 8),
    ("diagonal", 16384, 1, 8),
    ("diagonal", 16384, 16, 32),
    ("dense", 256, 1, 8),
    ("dense", 16384, 1, 8),
    ("dense", 16384, 1, 16),
    ("block", 16384, 1, 8),
]
METHODS = ("reference", "chunked", "blelloch", "auto")


def fastest(run: Callable[[], object], seconds: float = 0.5) -> float:
    """Milliseconds of the fastest of several runs."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def main() -> None:
    torch.set_num_threads(1)
    lines = ["| elements | T, B, n | loop | chunked | Blelloch | auto | one sum of the same size |", "| --- " * 7 + "|"]
    for structure, steps, batch, n in CASES:
        shape = {"diagonal": (), "dense": (n,), "block": ()}[structure]
        b = torch.randn(steps, batch, *([2] if structure == "block" else []), n)
        a = torch.rand(steps, batch, *([2, 2] if structure == "block" else []), n, *shape) / n
        times = [
            fastest(lambda m=method, s=structure, a=a, b=b: tl.linear_scan(a, b, structure=s, method=m))
            for method in METHODS
        ]
        times.append(fastest(lambda a=a: a + a))
        cells = " | ".join(f"{ms:.3g} ms" for ms in times)
        lines.append(f"| {structure} | {steps}, {batch}, {n} | {cells} |")
        print(lines[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scan.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
