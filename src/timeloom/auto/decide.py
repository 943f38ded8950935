"""What `auto` runs: chunk, warm-up and sweeps, by the size of a problem, the machine and what earlier calls showed."""

from __future__ import annotations

from typing import NamedTuple

from timeloom.auto.costs import Cost, cheapest, copies_inputs, cost_of, step_cost
from timeloom.auto.experience import Experience, assumed_warmup
from timeloom.kernels.gpu.sweeper import has_kernels
from timeloom.problem import Recurrence

PATIENCE = 4
"""Sweeps that `auto` grants before it finishes sequentially: with more, the plain run would have been as fast."""
SWEEPS = 6
"""Sweeps with corrections by the decay that meet the tolerance on most networks, however long their memory."""
STEPS_PER_SWEEP = 64
"""What a sweep on a GPU costs beside its steps, in steps: launches, and the correction."""
LEAST_CORRECTED = 8
"""Shortest chunks to correct: of more chunks, the corrections cost more than the steps."""
SHARE_OF_JUMPS = 0.1
"""Share of the tolerance that a jump is granted where memory is long: jumps add up over it."""
SHARE_OF_ERRORS = 0.5
"""Share of the tolerance that an error is granted there: both passes have one."""
LEAST_ERROR = 1e-5
"""What rounding in float32 adds up to over a long memory, in torch's own layer too."""


class Choice(NamedTuple):
    """How to cut and sweep, and what to accept; `reason` is for the report."""

    chunk: int
    warmup: int
    reason: str
    tolerance: float
    """Of a jump between chunks."""
    sweeps: int = 1
    """Sweeps to make at once, with corrections by the decay between them where there are several."""
    accepts: float = 0.0
    """Of the error of a start behind several sweeps."""

    @property
    def patience(self) -> int:
        """Sweeps after which the rest is run sequentially."""
        return PATIENCE if self.sweeps == 1 else 2 * SWEEPS


def decide(problem: Recurrence, experience: Experience, tolerance: float, given: bool = False) -> Choice:
    """The cheapest way to run this problem by our own sweeps; `given`: whether the user set the tolerance."""
    steps, batch = problem.steps, max(problem.batch, 1)
    cost, within = step_cost(problem), copies_inputs(problem)
    chunk, _ = cheapest(steps, batch, assumed_warmup(tolerance), cost, within)
    if chunk >= steps:
        experience.note_plan(1)
        return Choice(max(steps, 1), 0, f"auto: one chunk is cheapest for T={steps}, B={batch}", tolerance)
    if experience.resting:
        experience.skip_call()
        return _one_chunk(steps, experience, tolerance)
    chunk, warmup = cheapest(steps, batch, experience.warmup(tolerance), cost, within)
    whole = problem.lengths is None and problem.resets is None  # only such layers make several sweeps at once
    if experience.forgetting is not None and whole and has_kernels(problem):
        corrected, sweeps = _corrected(steps, batch, experience.sweeps or SWEEPS, cost, (chunk, warmup))
        if sweeps > 1:
            experience.note_plan(sweeps)
            reason = f"auto: {-(-steps // corrected)} chunks, {sweeps} sweeps with corrections by the decay"
            if given:
                return Choice(corrected, 0, reason, tolerance, sweeps, tolerance)
            accepts = max(SHARE_OF_ERRORS * tolerance, LEAST_ERROR)
            return Choice(corrected, 0, reason, SHARE_OF_JUMPS * tolerance, sweeps, accepts)
    if chunk >= steps:
        experience.rest()
        return _one_chunk(steps, experience, tolerance)
    experience.note_plan(1)
    known = "assumed" if experience.forgetting is None else "learned"
    return Choice(chunk, warmup, f"auto: {-(-steps // chunk)} chunks, warm-up of {warmup} steps {known}", tolerance)


def _one_chunk(steps: int, experience: Experience, tolerance: float) -> Choice:
    experience.note_plan(1)
    again = f"looking again in {experience.pause + 1} calls"
    return Choice(steps, 0, f"auto: one chunk, the network forgets too slowly; {again}", tolerance)


def _corrected(steps: int, batch: int, sweeps: int, cost: Cost, uncorrected: tuple[int, int]) -> tuple[int, int]:
    """Chunk and number of sweeps with corrections between them, where that is cheaper than one sweep after a warm-up;
    one sweep otherwise.
    """
    chunk = max(cheapest(steps, batch, STEPS_PER_SWEEP, cost)[0], LEAST_CORRECTED)
    corrected = sweeps * cost_of(steps, batch, chunk, STEPS_PER_SWEEP, cost)
    pays = chunk < steps and corrected < cost_of(steps, batch, *uncorrected, cost)
    return (chunk, sweeps) if pays else (uncorrected[0], 1)
