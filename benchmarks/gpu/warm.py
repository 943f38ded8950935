"""Compiles the kernels of a piece in parallel processes, into Triton's cache.

Row by row, compiling would take longer than measuring. `python -m benchmarks.gpu.warm` reads its cases as a JSON list.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

import torch

from benchmarks.cases import Case
from benchmarks.gpu import clock
from benchmarks.gpu.clock import learn
from benchmarks.gpu.compare import forward_of
from benchmarks.gpu.worker import case_of
from benchmarks.layers import Problem, TrainingStep, build
from benchmarks.process import surroundings

COMMAND = (sys.executable, "-m", "benchmarks.gpu.warm")
Typed = tuple[Case, str]
"""A case and the name of its dtype."""


def representatives(jobs: Sequence[Typed]) -> list[Typed]:
    """One case for each set of kernels: the longest with the smallest batch."""
    chosen: dict[tuple[object, ...], Typed] = {}
    for case, dtype in sorted(jobs, key=lambda job: (-job[0].batch, job[0].length)):
        aligned = case.batch == 1, case.batch % 16 == 0
        chosen[case.cell, case.hidden, case.regime.name, dtype, aligned] = case, dtype
    return list(chosen.values())


def warm(jobs: Sequence[Typed], processes: int, seconds: float, command: Sequence[str] = COMMAND) -> str:
    """Run all cases once and report on it; kernels that take too long are left to the row that needs them."""
    began, chosen = time.monotonic(), representatives(jobs)
    shares = [chosen[index::processes] for index in range(min(processes, len(chosen)))]
    running = [_start(share, command) for share in shares]
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, seconds - (time.monotonic() - began)))
    stopped = [process for process in running if process.poll() is None]
    for process in stopped:
        process.kill()
        process.wait()
    late = f", {len(stopped)} of them stopped at the time's end" if stopped else ""
    return f"compiled for {len(chosen)} cases in {len(running)} processes, {time.monotonic() - began:.0f} s{late}"


def _start(share: Sequence[Typed], command: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=surroundings())
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as requests:
        json.dump([{"case": asdict(case), "dtype": dtype} for case, dtype in share], requests)
    return process


def run_once(case: Case, dtype: str) -> None:
    """Run both passes until timeloom knows the network, and the forward pass alone."""
    layer = build(case, "timeloom").to(clock.DEVICE, getattr(torch, dtype))
    problem = Problem.draw(case, clock.DEVICE).to(getattr(torch, dtype))
    learn(TrainingStep(layer, problem))
    learn(forward_of(layer, problem.x))


def _main() -> None:
    for request in json.load(sys.stdin):
        with suppress(Exception):  # torch's or Triton's; its row will tell
            run_once(case_of(request["case"]), request["dtype"])


if __name__ == "__main__":
    _main()
