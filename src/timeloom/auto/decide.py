"""`auto`: decides how to run a recurrence from its size, the machine, and what earlier calls on the module showed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from timeloom.auto.costs import (
    StepCost,
    cheapest,
    copies_inputs,
    cost_of,
    decay_is_cheap,
    newton_up_to,
    step_cost,
)
from timeloom.kernels.gpu.sweeper import has_kernels
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve.plan import Correction, Plan

if TYPE_CHECKING:
    from timeloom.solvers.base import Solver

ASSUMED_FORGETTING = 0.728
"""Forgetting of a network nothing is known about, a step: a freshly initialised GRU or LSTM forgets faster."""
NOISE = 1e-7
"""Jumps this small are rounding: they bound how fast a network forgets, but do not tell it."""
NEARLY = 4
"""A first jump within this factor of the tolerance needs no longer warm-up: the few rows over it are run again."""
MOST_MISSES = 4
"""Quick certificates that may fail by little, each making the warm-up longer, before they are not tried any more."""
MOST_FALLBACKS = 2
"""Times in a row that sweeps may give up, after each of which more is known, before the network is left alone."""
PATIENCE = 4
"""Sweeps that `auto` grants before it finishes sequentially: with more, the plain run would have been as fast."""
SWEEPS = 6
"""Sweeps with corrections by the decay that meet the tolerance on most networks, however long their memory."""
STEPS_PER_SWEEP = 12
"""What a sweep on a GPU costs beside its steps, in steps: launches, and the correction."""
LEAST_CORRECTED = 8
"""Shortest chunks to correct: of more chunks, the corrections cost more than the steps."""
FEW_SWEEPS = 2
"""Corrected sweeps so few that a warm-up may be cheaper again."""
FIRST_LOOK = 8
"""Solves of so few sweeps in a row after which that is tried; twice as many after each try that failed."""
SHARE_OF_JUMPS = 0.1
"""Share of the tolerance that a jump is granted where memory is long: jumps add up over it."""
SHARE_OF_ERRORS = 0.5
"""Share of the tolerance that an error is granted there: both passes have one."""
LEAST_ERROR = 1e-5
"""What rounding in float32 adds up to over a long memory, in torch's own layer too."""
SPARE = 0.1
"""An error this much below its limit would have met it a sweep earlier."""
LONGEST_PAUSE = 256
"""Calls after which `auto` looks again at a network that did not contract, at most."""


@dataclass
class Experience:
    """What the calls on one layer and direction have shown so far; never part of a state_dict."""

    forgetting: float | None = None
    """Factor by which one step shrinks a difference between two states, as an upper bound."""
    correcting: bool = False
    """Whether the last plan was for several sweeps at once."""
    sweeps: int | None = None
    """Sweeps with corrections by the decay that were enough, where they were tried."""
    calm: int = 0
    """Solves in a row for which few corrected sweeps were enough."""
    look_after: int = FIRST_LOOK
    """Number of them after which a warm-up is tried instead."""
    pause: int = 0
    """Calls for which shooting is not tried."""
    corrected: bool = False
    """Whether the last solve needed more than its warm-up and one sweep."""
    uncertified: bool = False
    """Whether the quick certificate of one sweep has just failed, and a general solve is under way."""
    misses: int = 0
    """Times that it failed by so little that the general solve found nothing to correct."""
    fallbacks: int = 0
    """Times in a row that sweeps gave up."""
    setbacks: int = 0
    """Times in a row that shooting turned out not to pay."""
    solves: int = 0
    """Solves that asked whether their gradient is due for a comparison."""
    extra_cycles: int = 0
    """Cycles that multigrid was given beyond the number asked for, since its gradients were too far off."""

    def due(self, every: int | None) -> bool:
        """Whether this solve's gradient is one of those to compare with the exact one."""
        self.solves += 1
        return every is not None and self.solves % every == 0

    def warmup(self, tolerance: float) -> int:
        """Steps after which this network has forgotten where it started, to within the tolerance."""
        forgetting = ASSUMED_FORGETTING if self.forgetting is None else self.forgetting
        if forgetting >= 1 - 1e-6:
            return 10**9
        steps = max(4, math.ceil(math.log(tolerance / 4) / math.log(forgetting)))
        return steps + self.misses * math.ceil(steps / 8)

    @property
    def trusted(self) -> bool:
        """Whether one sweep is likely to be certified at once."""
        return not self.corrected and self.misses <= MOST_MISSES

    def learn(self, report: SolveReport) -> None:
        """Take in what a shooting solve showed, if it can be seen yet."""
        if report.certificate is not None:
            return
        self.corrected = report.iterations > 1 or report.fell_back or bool(report.levels)
        self.fallbacks = self.fallbacks + 1 if report.fell_back else 0
        self.misses += self.uncertified and not self.corrected
        self.uncertified = False
        if self.correcting and report.residuals and not report.warmup:  # else it is of an earlier plan
            self._learn_sweeps(report)
        if report.warmup and report.residuals:
            first = report.residuals[0]
            seen = min(max(first, NOISE), 1.0) ** (1 / report.warmup)
            near = first <= NEARLY * report.tolerance  # what is left is rounding: a longer warm-up would not help
            self.forgetting = min(seen, self.forgetting or 1.0) if near else seen
            if report.converged and not report.fell_back:
                self.setbacks = 0
            if not self.corrected:
                self.look_after = FIRST_LOOK
            if self.misses > MOST_MISSES and first <= report.tolerance / 4:
                self.misses = 0
        if self.fallbacks >= MOST_FALLBACKS:
            self.rest()

    def _learn_sweeps(self, report: SolveReport) -> None:
        """Take in how many sweeps were needed. Few, for a while: the network may forget quickly again, so look at that
        afresh.
        """
        if report.fell_back or not report.converged:
            self.rest()
            return
        self.setbacks = 0
        spare = report.residuals[-1] < SPARE * report.tolerance
        self.sweeps = max(report.iterations - spare, FEW_SWEEPS)
        self.calm = self.calm + 1 if self.sweeps <= FEW_SWEEPS else 0
        if self.calm >= self.look_after:
            self.sweeps = self.forgetting = None
            self.calm, self.look_after = 0, min(2 * self.look_after, LONGEST_PAUSE)

    def rest(self) -> None:
        """Shooting does not pay on this network as it is: leave it alone for a while, then look at it afresh."""
        self.setbacks += 1
        self.fallbacks = 0
        self.pause = min(4 * 2**self.setbacks, LONGEST_PAUSE)
        self.forgetting = self.sweeps = None


@lru_cache(maxsize=64)
def assumed_warmup(tolerance: float) -> int:
    """Steps after which a network nothing is known about has forgotten where it started."""
    return Experience().warmup(tolerance)


@dataclass
class Memory:
    """The experience of one layer and direction, forward and backward."""

    forward: Experience = field(default_factory=Experience)
    backward: Experience = field(default_factory=Experience)

    def learn_backward(self, report: SolveReport) -> None:
        """Take in what a backward solve showed; a gradient that was too far off costs both passes a cycle more."""
        self.backward.learn(report)
        if report.gradient is not None and report.gradient.too_far:
            self.forward.extra_cycles += 1
            self.backward.extra_cycles += 1


def decide(solver: Solver, problem: Recurrence, experience: Experience, tolerance: float | None = None) -> Plan:
    """The cheapest way to run this problem by our own sweeps, to the solver's tolerance for states unless told."""
    tolerance = solver.tolerance(problem) if tolerance is None else tolerance
    steps, batch = problem.steps, max(problem.batch, 1)
    cost, within = step_cost(problem), copies_inputs(problem)
    chunk, warmup = cheapest(steps, batch, assumed_warmup(tolerance), cost, within)
    correction: Correction = "auto"
    sweeps, accepts = 1, 0.0
    if chunk >= steps:
        reason = f"auto: one chunk is cheapest for T={steps}, B={batch}"
    elif experience.pause > 0:
        experience.pause -= 1
        chunk, warmup = steps, 0
        reason = f"auto: one chunk, the network forgets too slowly; looking again in {experience.pause + 1} calls"
    else:
        needed = experience.warmup(tolerance)
        known = "assumed" if experience.forgetting is None else "learned"
        chunk, warmup = cheapest(steps, batch, needed, cost, within)
        whole = problem.lengths is None and problem.resets is None  # only such layers make several sweeps at once
        if experience.forgetting is not None and whole and has_kernels(problem):
            corrected, sweeps = _corrected(steps, batch, experience.sweeps or SWEEPS, cost, (chunk, warmup))
        if sweeps > 1:
            chunk, warmup, correction = corrected, 0, "diag"
            accepts = tolerance if solver.tol is not None else max(SHARE_OF_ERRORS * tolerance, LEAST_ERROR)
            tolerance *= SHARE_OF_JUMPS if solver.tol is None else 1
            reason = f"auto: {-(-steps // chunk)} chunks, {sweeps} sweeps with corrections by the decay"
        elif chunk < steps:
            reason = f"auto: {-(-steps // chunk)} chunks, warm-up of {warmup} steps {known}"
        else:
            experience.rest()
            reason = f"auto: one chunk, the network forgets too slowly; looking again in {experience.pause + 1} calls"
    experience.correcting = sweeps > 1
    return Plan(
        chunk=max(chunk, 1),
        correction=correction,
        warmup=warmup,
        tolerance=tolerance,
        max_iters=solver.max_iters or (PATIENCE if sweeps == 1 else 2 * SWEEPS),
        on_divergence=solver.on_divergence,
        reason=reason,
        decay_is_cheap=decay_is_cheap(problem),
        newton_up_to=newton_up_to(problem),
        sweeps=sweeps,
        accepts=accepts,
    )


def _corrected(steps: int, batch: int, sweeps: int, cost: StepCost, uncorrected: tuple[int, int]) -> tuple[int, int]:
    """Chunk and number of sweeps with corrections between them, where that is cheaper than one sweep after a warm-up;
    one sweep otherwise.
    """
    chunk = max(cheapest(steps, batch, STEPS_PER_SWEEP, cost)[0], LEAST_CORRECTED)
    corrected = sweeps * cost_of(steps, batch, chunk, STEPS_PER_SWEEP, cost)
    pays = chunk < steps and corrected < cost_of(steps, batch, *uncorrected, cost)
    return (chunk, sweeps) if pays else (uncorrected[0], 1)
