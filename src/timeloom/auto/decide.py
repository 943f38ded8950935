"""The choice of `auto`: chunk, warm-up and sweeps, by problem size, machine and what earlier calls showed."""

from __future__ import annotations

from typing import NamedTuple

from timeloom.auto.costs import (
    Cost,
    cheapest,
    cheapest_dense,
    chunk_to_correct,
    cost_of,
    cost_of_sweeps,
    longest_warmup,
    step_cost,
)
from timeloom.auto.experience import NEVER, Experience, assumed_warmup
from timeloom.auto.sweep_counts import STRETCHES, TOO_MANY
from timeloom.auto.trials import Way, fastest
from timeloom.kernels.cuda.sweeper import has_kernels
from timeloom.problem import Recurrence

PATIENCE = 4
"""Sweeps after which `auto` finishes sequentially: with more of them, a sequential run would have been as fast."""
SWEEPS = 6
"""Sweeps with corrections by the decay that meet the tolerance on most networks, however long their memory."""
SHARE_OF_JUMPS = 0.1
"""Share of the tolerance allowed for a jump if memory is long, since jumps add up over it."""
SHARE_OF_ERRORS = 0.5
"""Share of the tolerance allowed for an error in that case, since each of the two passes has one."""
LEAST_ERROR = 1e-5
"""Error to which rounding in float32 adds up over a long memory, as it does in torch's own layer."""
RETRY_FACTORS = (4, 2)
"""How many times the steps that were not enough a second warm-up has; the first factor that is worth it is taken."""
RETRY_SHARE = 0.5
"""Share of one chunk's time that a second warm-up may take."""
WORTH_CHANGING = 1.3
"""Factor by which sweeps over chunks of another length must be expected to take less time before they are tried."""
LOOK_SHARE = 0.9
"""Share of the time of several sweeps that a warm-up may take that is tried in their place."""


class Choice(NamedTuple):
    """How to cut and sweep, and what to accept; `reason` is for the report."""

    chunk: int
    warmup: int
    reason: str
    tolerance: float
    """Largest jump between chunks to accept."""
    sweeps: int = 1
    """Number of sweeps in one call, with corrections by the decay between them if there are several."""
    accepts: float = 0.0
    """Largest error of a start to accept after several sweeps."""
    dense: bool = False
    """Whether gradients at chunk ends are computed by dense transfers."""
    stretch: int = 1
    """Factor by which the chunks of several sweeps are longer than the ones with the fastest sweeps."""
    expected: float = 0.0
    """Expected time in microseconds, if the costs are in this unit."""
    retry: int = 0
    """Steps of a second, longer warm-up, tried before one chunk if the certificate is missed; 0 for none."""
    has_missed: bool = False
    """Whether earlier calls have missed a certificate."""

    @property
    def patience(self) -> int:
        """Sweeps after which the rest is run sequentially."""
        return PATIENCE if self.sweeps == 1 else max(2 * SWEEPS, self.sweeps)


def decide(problem: Recurrence, experience: Experience, tolerance: float, given: bool, linear: bool) -> Choice:
    """The cheapest way to run this problem by our own sweeps.

    given: whether the user set the tolerance. linear: whether this is the adjoint, for which a chunk is a linear map.
    """
    steps, batch = problem.steps, max(problem.batch, 1)
    cost = step_cost(problem, linear)
    chunk, _ = cheapest(steps, batch, assumed_warmup(tolerance), cost)
    if chunk >= steps:
        experience.note_plan(1)
        return Choice(max(steps, 1), 0, f"auto: one chunk is cheapest for T={steps}, B={batch}", tolerance)
    if experience.resting:
        experience.skip_call()
        return _one_chunk(steps, experience, tolerance)
    chunk, warmup = cheapest(steps, batch, experience.warmup(tolerance), cost)
    if warmup > assumed_warmup(tolerance):
        most = cost.worth * cost_of(steps, batch, steps, 0, cost)
        if cost_of(steps, batch, chunk, warmup, cost) > most:
            chunk, warmup = steps, 0
    whole = problem.lengths is None and problem.resets is None  # only such layers run several sweeps in one call
    kernels = has_kernels(problem)
    if experience.forgetting is not None and whole and kernels:
        size = problem.cell.size if linear and experience.allows_dense else 0
        choice = _several_sweeps(steps, batch, experience, cost, (chunk, warmup), size)
        if choice is not None and experience.looking and not choice.dense:
            longest = experience.worth_looking(longest_warmup(steps, batch, LOOK_SHARE * choice.expected, cost))
            if longest:
                choice, (chunk, warmup) = None, cheapest(steps, batch, longest, cost)
        if choice is not None:
            experience.note_plan(choice.sweeps, choice.dense, choice.stretch)
            accepts = max(SHARE_OF_ERRORS * tolerance, LEAST_ERROR)
            retry = 0 if choice.dense else _retry(steps, batch, choice.chunk, choice.sweeps * choice.chunk, cost)
            return choice._replace(
                tolerance=tolerance if given else SHARE_OF_JUMPS * tolerance,
                accepts=tolerance if given else accepts,
                retry=retry,
                has_missed=True,
            )
    if chunk >= steps:
        memory = experience.warmup(tolerance)
        experience.rest()
        return _one_chunk(steps, experience, tolerance, memory)
    experience.note_plan(1)
    known = "assumed" if experience.forgetting is None else "learned: so long is its memory"
    reason = f"auto: {-(-steps // chunk)} chunks, warm-up of {warmup} steps {known}"
    expected = cost_of(steps, batch, chunk, warmup, cost) if kernels and whole else 0.0
    accepts = LEAST_ERROR if kernels and not given else 0.0
    retry = _retry(steps, batch, chunk, warmup, cost) if kernels and problem.lengths is None else 0
    missed = experience.search.too_short > 0
    return Choice(chunk, warmup, reason, tolerance, 1, accepts, expected=expected, retry=retry, has_missed=missed)


def _retry(steps: int, batch: int, chunk: int, seen: int, cost: Cost) -> int:
    """Steps of a second warm-up, if sweeps over `seen` steps are not enough; 0 if one chunk takes little more."""
    most = RETRY_SHARE * cost_of(steps, batch, steps, 0, cost)
    longer = (times * seen for times in RETRY_FACTORS)
    return next((warmup for warmup in longer if cost_of(steps, batch, chunk, warmup, cost) <= most), 0)


def _one_chunk(steps: int, experience: Experience, tolerance: float, memory: int = NEVER) -> Choice:
    """Everything in one chunk; `memory`: steps in which the network forgets, if that is known."""
    experience.note_plan(1)
    again = f"looking again in {experience.pause + 1} calls"
    slowly = "forgets too slowly" if memory >= NEVER else f"forgets too slowly, in about {memory:,} steps"
    return Choice(steps, 0, f"auto: one chunk, the network {slowly}; {again}", tolerance)


def _several_sweeps(
    steps: int, batch: int, experience: Experience, cost: Cost, uncorrected: tuple[int, int], size: int
) -> Choice | None:
    """Sweeps with corrections by the decay, or dense transfers, if one of them is faster than a warm-up and one sweep.

    None if neither is. Measured times decide; a way that was not measured and may be faster is tried.

    uncorrected: chunk and warm-up of the single sweep.
    size: size of the adjoint's state, 0 to rule out dense transfers.
    """
    found: dict[Way, Choice] = {}
    cut = _chunks_to_correct(steps, batch, experience, cost)
    if cut is not None:
        stretch, chunk, sweeps = cut
        reason = f"auto: {-(-steps // chunk)} chunks, {sweeps} sweeps with corrections by the decay"
        expected = cost_of_sweeps(steps, batch, chunk, sweeps, cost)
        found["sweeps"] = Choice(chunk, 0, reason, 0.0, sweeps, expected=expected, stretch=stretch)
    if size:
        chunk, expected = cheapest_dense(steps, batch, size, cost)
        reason = f"auto: {-(-steps // chunk)} chunks, joined by dense transfers"
        found["dense"] = Choice(chunk, 0, reason, 0.0, 2, dense=True, expected=expected)
    least = cost_of(steps, batch, *uncorrected, cost)
    takes: dict[Way, float] = {way: choice.expected for way, choice in found.items()}
    if uncorrected[0] < steps:
        takes["warm-up"] = least
    else:  # one chunk, which needs no trial
        takes = {way: expected for way, expected in takes.items() if expected < least}
    return found.get(fastest(takes, experience.trials.factors)) if takes else None


def _chunks_to_correct(steps: int, batch: int, experience: Experience, cost: Cost) -> tuple[int, int, int] | None:
    """The stretch of the chunks with the least time for all sweeps they need, their steps, and the number of sweeps.

    Longer chunks need fewer sweeps, and fewer rows take less time a step. None if there is nothing to cut.
    """
    shortest, known = chunk_to_correct(steps, batch, cost), experience.counts
    needs = zip(STRETCHES, known.alternatives, strict=True) if known.needed is not None else [(known.stretch, SWEEPS)]
    cuts = [(stretch, stretch * shortest, sweeps) for stretch, sweeps in needs if sweeps is not None]

    def time(cut: tuple[int, int, int]) -> float:
        takes = cost_of_sweeps(steps, batch, *cut[1:], cost)
        return takes if cut[0] == known.stretch else WORTH_CHANGING * takes

    return min((cut for cut in cuts if cut[1] < steps and cut[2] < TOO_MANY), key=time, default=None)
