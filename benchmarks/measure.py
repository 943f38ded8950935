"""How a case is measured: time of both sides in turn, and the error of both against float64."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.layers import LIBRARIES, Library, Problem, TrainingStep, build
from timeloom.nn.base import Recurrent

Name = TypeVar("Name", bound=str)
Clock = Callable[[Callable[[], object]], float]
"""Seconds of a call."""

WARM_UPS = 3
SLOW = 1.0
"""Seconds of a call above which one warm-up is enough for it; timeloom, which learns, gets all of them."""
ROUNDS = (3, 15)
"""Fewest and most rounds."""
ROUND_BUDGET = 1.5
"""Seconds that the rounds of a case may take together beyond the fewest."""
TURN = 0.1
"""Seconds of a side's turn in a round: a fast step is repeated to fill it."""
LONGEST_TURN = 20
"""Most steps in a turn."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a training step."""

    median: float
    fastest: float
    samples: int


@dataclass(frozen=True)
class Solve:
    """What timeloom's report says about the last step."""

    solver: str
    chunk: int
    warmup: int
    sweeps: int
    backward_chunk: int | None
    backward_warmup: int | None
    backward_sweeps: int | None
    fell_back: bool
    reason: str


@dataclass(frozen=True)
class Measurement:
    """One case, both sides."""

    case: Case
    timings: dict[Library, Timing]
    errors: dict[Library, dict[str, float]]
    """Error of each output and gradient against float64: largest difference over largest value."""
    solve: Solve
    peak_bytes: dict[Library, int] | None = None

    @property
    def ratio(self) -> float:
        """How many times faster timeloom is, by the medians."""
        return self.timings["torch"].median / self.timings["timeloom"].median

    def worst_error(self, library: Library) -> float:
        return max(self.errors[library].values())

    @property
    def meets_goal(self) -> bool:
        return self.ratio >= self.case.goal

    @property
    def accurate(self) -> bool:
        """Whether timeloom's error is within twice torch's own."""
        return self.worst_error("timeloom") <= 2 * self.worst_error("torch")


def measure(case: Case) -> Measurement:
    """Time both sides in one run, and compare both with torch in float64."""
    problem = Problem.draw(case)
    layers = {library: build(case, library) for library in LIBRARIES}
    steps = {library: TrainingStep(layers[library], problem) for library in LIBRARIES}
    timings = time_in_turns(steps)
    # After the timing, so that errors are measured with the settings that timeloom learned and was timed with.
    results = {library: steps[library].results() for library in LIBRARIES}
    solve = solve_of(layers["timeloom"])
    del steps
    exact = exact_results(case, problem)
    errors = {library: relative_errors(results[library], exact) for library in LIBRARIES}
    return Measurement(case, timings, errors, solve)


def exact_results(case: Case, problem: Problem, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Outputs and gradients by torch in float64, on the problem's device, with these weights or the case's own."""
    truth = build(case, "torch").to(problem.x.device, torch.float64)
    if weights is not None:
        truth.load_state_dict(weights)
    return TrainingStep(truth, problem.to(torch.float64)).results()


def relative_errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """max|a - b| / max|b| of each tensor."""
    return {
        name: ((results[name].double() - truth).abs().max() / truth.abs().max()).item() for name, truth in exact.items()
    }


def wall_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call by the host's clock."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def time_in_turns(
    steps: Mapping[Name, Callable[[], object]], clock: Clock = wall_seconds, budget: float = ROUND_BUDGET
) -> dict[Name, Timing]:
    """Time the sides in turn, round after round, so that other work on the machine affects all alike.

    In a round each side's turn is as many steps as fit into `TURN`, at least one; which side begins alternates. Every
    step is a sample.
    """
    usual = {library: _warm_up(library, step, clock) for library, step in steps.items()}
    turns = {library: max(1, min(LONGEST_TURN, int(TURN / max(seconds, 1e-9)))) for library, seconds in usual.items()}
    round_seconds = sum(turns[library] * usual[library] for library in steps)
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(budget / max(round_seconds, 1e-9))))
    samples: dict[Name, list[float]] = {library: [] for library in steps}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            order = list(steps) if index % 2 == 0 else list(steps)[::-1]
            for library in order:
                samples[library] += [clock(steps[library]) for _ in range(turns[library])]
    finally:
        gc.enable()
    return {
        library: Timing(1e3 * statistics.median(taken), 1e3 * min(taken), len(taken))
        for library, taken in samples.items()
    }


def _warm_up(name: str, step: Callable[[], object], clock: Clock) -> float:
    """Call the step until caches are warm and timeloom has learned; returns the seconds of the last call."""
    seconds = clock(step)
    enough = name != "timeloom" and seconds >= SLOW
    for _ in range(0 if enough else WARM_UPS - 1):
        seconds = clock(step)
    return seconds


def solve_of(layer: object) -> Solve:
    """What the last step of a timeloom layer did."""
    assert isinstance(layer, Recurrent)
    report = layer.reports[0]
    back = report.backward
    return Solve(
        solver=report.solver,
        chunk=report.chunk,
        warmup=report.warmup,
        sweeps=report.iterations,
        backward_chunk=back.chunk if back else None,
        backward_warmup=back.warmup if back else None,
        backward_sweeps=back.iterations if back else None,
        fell_back=report.fell_back or (back.fell_back if back else False),
        reason=report.reason,
    )
