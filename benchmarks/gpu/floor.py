"""How fast a training step could be: the bytes that must be moved, and the steps that must be sequential.

(a) Bandwidth. Any method reads x and the states' gradients and writes the states and x's gradient, `(T, B, n)` each,
    and reads every weight and writes its gradient:  s (4 T B n + 2 P) bytes, with s bytes a number and P weights, at
    the bandwidth of a large copy on this device. The loss, and what is kept for the backward pass, are not counted.
(b) Latency. A sweep takes its steps one after the other, however few rows it has: warm-up + chunk × sweeps steps,
    forward and backward, at the time of one step of a lone chunk. It is the floor of the chosen cut of time.

The floor is the larger of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.cases import GATES, Case, CellName
from benchmarks.gpu import clock
from benchmarks.gpu.clock import captured, event_seconds
from benchmarks.layers import Problem, TrainingStep, build
from benchmarks.measure import Solve, time_in_turns
from timeloom.solvers import Shooting

COPIED = 2**29
"""Bytes of the copy that measures the bandwidth: far beyond any cache."""
SHORT, LONG = 128, 640
"""Steps of the two lone chunks whose difference gives the time of a step."""


@dataclass(frozen=True)
class Floor:
    """Lower bounds on the milliseconds of a training step."""

    bandwidth_ms: float
    latency_ms: float | None
    """None if torch's own layer ran, or the time of a step could not be measured."""

    @property
    def milliseconds(self) -> float:
        return max(self.bandwidth_ms, self.latency_ms or 0.0)


@dataclass(frozen=True)
class StepLatency:
    """Microseconds of one step of a lone chunk."""

    forward: float
    backward: float


def bytes_moved(case: Case, itemsize: int) -> int:
    """The bytes of bound (a)."""
    weights = GATES[case.cell] * case.hidden * (2 * case.hidden + 2)
    return itemsize * (4 * case.length * case.batch * case.hidden + 2 * weights)


def chain(solve: Solve) -> tuple[int, int]:
    """The sequential steps of bound (b), forward and backward."""
    backward = (solve.backward_warmup or 0) + (solve.backward_chunk or 0) * (solve.backward_sweeps or 0)
    return solve.warmup + solve.chunk * solve.sweeps, backward


def floor_of(case: Case, itemsize: int, solve: Solve, bytes_per_second: float, latency: StepLatency | None) -> Floor:
    """Both bounds for a case, as timeloom solved it."""
    moving = 1e3 * bytes_moved(case, itemsize) / bytes_per_second
    if latency is None or solve.solver == "sequential":
        return Floor(moving, None)
    forward, backward = chain(solve)
    return Floor(moving, 1e-3 * (forward * latency.forward + backward * latency.backward))


@cache
def bandwidth() -> float:
    """Bytes a second of a large copy on this GPU, read and written."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=clock.DEVICE)
    target = torch.empty_like(source)
    timing = time_in_turns({"copy": lambda: target.copy_(source)}, event_seconds, 0.2)["copy"]
    return 2 * COPIED / (1e-3 * timing.median)


@cache
def step_latency(cell: CellName, hidden: int) -> StepLatency | None:
    """The time of a step in float32; None if a lone chunk cannot be run in a CUDA graph."""
    try:
        whole = [_lone_chunk(Case(steps, 1, hidden, cell)) for steps in (SHORT, LONG)]
    except RuntimeError:
        return None
    forward, both = (1e3 * (long - short) / (LONG - SHORT) for short, long in zip(*whole, strict=True))
    return StepLatency(forward, both - forward) if 0 < forward < both else None


def _lone_chunk(case: Case) -> tuple[float, float]:
    """Milliseconds of forward, and of forward + backward, in one chunk of all steps."""
    layer = build(case, "timeloom").to(clock.DEVICE)
    layer.solver = Shooting(chunk=case.length)  # type: ignore[assignment]
    step = TrainingStep(layer, Problem.draw(case, clock.DEVICE))
    calls: dict[str, Callable[[], object]] = {"forward": captured(lambda: step.layer(step.x)), "both": captured(step)}
    times = time_in_turns(calls, event_seconds, 0.2)
    return times["forward"].median, times["both"].median
