"""Two trees of timeloom side by side on this CPU: layers' calls, one thread, in turns.

    python -m benchmarks.versus OTHER/src                        # this tree against another one
    python -m benchmarks.versus OTHER/src --cells LSTM --units 64 --batch 16 --ways chunk
    python -m benchmarks.versus OTHER/src --clock cpu            # where others use the machine, too

Each tree runs in a process of its own; both are held to one core, and take turns. A ratio is this tree's time over the
other's: of the lower quartiles of all turns, since what else runs on a machine only adds to a turn; and the median of
the ratios of turns side by side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process import Process, serve

HERE = Path(__file__).parents[1]
CELLS, UNITS, BATCH, STEPS = ("GRU", "LSTM", "RNN"), (16, 32, 64, 128, 256), (1, 16), (128, 1024, 16384)
INPUTS = 8
WAYS, PASSES = ("auto", "chunk"), ("forward", "step")
WARM_UPS, FEWEST, MOST = 5, 7, 301
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
TURN = 0.004
"""Seconds of a turn: shorter calls are repeated to fill it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.versus", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", type=Path, help="the folder that the other tree's package lies in")
    parser.add_argument("--cells", nargs="+", default=CELLS, help="layers of timeloom, or its cells")
    parser.add_argument("--units", nargs="+", type=int, default=UNITS)
    parser.add_argument("--batch", nargs="+", type=int, default=BATCH)
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="auto: as it comes; chunk: all of time")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of a row, of both trees together")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="wall: what one waits; cpu: what it computes")
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, {options.core})
    trees = [_start(source, options.clock) for source in (HERE / "src", options.other.resolve())]
    rows = itertools.product(
        options.cells, options.units, options.batch, options.steps, options.ways, options.passes
    )  # fmt: skip
    print("cell units batch steps way   pass     other ms   this ms   ratio  of turns", flush=True)
    for row in rows:
        _compare(trees, row, options.seconds)
    for tree in trees:
        tree.close()
    return 0


def _start(source: Path, clock: str) -> Process:
    command = [sys.executable, "-c", f"from benchmarks.versus import answer_all; answer_all({clock!r})"]
    return Process(["env", f"PYTHONPATH={source}{os.pathsep}{HERE}", "OMP_NUM_THREADS=1", *command])


def _compare(trees: Sequence[Process], row: tuple[Any, ...], seconds: float) -> None:
    for tree in trees:
        if tree.ask(json.dumps(row), 300) is None:
            raise RuntimeError(f"a tree's process ended while it prepared {row}")
    times: list[list[float]] = [[], []]
    began = time.perf_counter()
    while len(times[0]) < FEWEST or (time.perf_counter() - began < seconds and len(times[0]) < MOST):
        for tree, found in zip(trees, times, strict=True):
            found.append(float(tree.ask("", 300) or "nan"))
    this, other = (statistics.quantiles(found, n=4)[0] for found in times)
    of_turns = statistics.median(one / another for one, another in zip(*times, strict=True))
    cell, units, batch, steps, way, which = row
    print(
        f"{cell:4} {units:5} {batch:5} {steps:5} {way:5} {which:7} {other * 1e3:9.3f} {this * 1e3:9.3f}"
        f" {this / other:7.3f} {of_turns:7.3f}", flush=True,
    )  # fmt: skip


def answer_all(clock: str) -> None:
    """Run one tree's process: a line with a row prepares it, an empty line is answered by the seconds of a call."""
    calls: list[tuple[Callable[[], object], int]] = []
    now = CLOCKS[clock]

    def answer(request: str) -> str:
        if request.strip():
            calls[:] = [_prepare(*json.loads(request))]
            return "ready"
        (call, repeats), began = calls[0], now()
        for _ in range(repeats):
            call()
        return str((now() - began) / repeats)

    serve(answer)


def _prepare(cell: str, units: int, batch: int, steps: int, way: str, which: str) -> tuple[Callable[[], object], int]:
    """The call of a row, and how often it is repeated in a turn."""
    import torch

    import timeloom
    from timeloom.solvers import Shooting

    torch.manual_seed(0)
    options: dict[str, Any] = {"solver": Shooting(chunk=steps)} if way == "chunk" else {}
    own = getattr(timeloom.cells, cell, None)
    layer = timeloom.Layer(own(INPUTS, units), **options) if own else getattr(timeloom, cell)(INPUTS, units, **options)
    x = torch.randn(steps, batch, INPUTS)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(x)[0].sum().backward()

    call = forward if which == "forward" else step
    taken = []
    for _ in range(WARM_UPS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return call, max(1, round(TURN / min(taken)))  # by the fastest: delayed calls would make too few


if __name__ == "__main__":
    sys.exit(main())
