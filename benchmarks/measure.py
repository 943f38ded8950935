"""How a case is measured: time of both sides in turn, and the error of both against float64."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import timeloom
from benchmarks.cases import Case
from benchmarks.layers import LIBRARIES, Library, Problem, TrainingStep, build

WARM_UPS = 3
SLOW = 1.0
"""Seconds of torch's step from which on one warm-up is enough for it; timeloom, which learns, gets them all."""
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
    sweeps: int
    backward_chunk: int | None
    backward_sweeps: int | None
    fell_back: bool
    reason: str


@dataclass(frozen=True)
class Measurement:
    """One case, both sides."""

    case: Case
    timings: dict[Library, Timing]
    errors: dict[Library, dict[str, float]]
    """Of each output and gradient against float64: largest difference over largest value."""
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
    """Times both sides in one run and compares both with torch in float64."""
    problem = Problem.draw(case)
    layers = {library: build(case, library) for library in LIBRARIES}
    steps = {library: TrainingStep(layers[library], problem) for library in LIBRARIES}
    timings = time_in_turns(steps)
    # After the timing, so that the errors are those of the settings timeloom has learned and was timed with.
    results = {library: steps[library].results() for library in LIBRARIES}
    solve = _solve_of(layers["timeloom"])
    del steps
    exact = TrainingStep(build(case, "torch").double(), problem.double()).results()
    errors = {library: relative_errors(results[library], exact) for library in LIBRARIES}
    return Measurement(case, timings, errors, solve)


def relative_errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """max|a - b| / max|b| of each tensor."""
    return {
        name: ((results[name].double() - truth).abs().max() / truth.abs().max()).item() for name, truth in exact.items()
    }


def time_in_turns(steps: dict[Library, TrainingStep]) -> dict[Library, Timing]:
    """Times the sides in turn, round after round, so that whatever else the machine does meets both.

    In a round each side's turn is as many steps as fit into `TURN`, at least one; who begins alternates. All
    single steps are samples.
    """
    usual = {library: _warm_up(library, step) for library, step in steps.items()}
    turns = {library: max(1, min(LONGEST_TURN, int(TURN / seconds))) for library, seconds in usual.items()}
    round_seconds = sum(turns[library] * usual[library] for library in steps)
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(ROUND_BUDGET / round_seconds)))
    samples: dict[Library, list[float]] = {library: [] for library in steps}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            order = list(steps) if index % 2 == 0 else list(steps)[::-1]
            for library in order:
                samples[library] += [_seconds(steps[library]) for _ in range(turns[library])]
    finally:
        gc.enable()
    return {
        library: Timing(1e3 * statistics.median(taken), 1e3 * min(taken), len(taken))
        for library, taken in samples.items()
    }


def _warm_up(library: Library, step: TrainingStep) -> float:
    """Calls the step until caches are warm and timeloom has learned; returns the seconds of the last call."""
    seconds = _seconds(step)
    enough = library == "torch" and seconds >= SLOW
    for _ in range(0 if enough else WARM_UPS - 1):
        seconds = _seconds(step)
    return seconds


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _solve_of(layer: object) -> Solve:
    assert isinstance(layer, timeloom.GRU | timeloom.LSTM)
    report = layer.reports[0]
    back = report.backward
    return Solve(
        solver=report.solver,
        chunk=report.chunk,
        sweeps=report.iterations,
        backward_chunk=back.chunk if back else None,
        backward_sweeps=back.iterations if back else None,
        fell_back=report.fell_back or (back.fell_back if back else False),
        reason=report.reason,
    )
