"""What earlier calls have shown of a layer: how fast it forgets, whether sweeps were enough. Changed by its own methods
alone, from the reports of solves.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from timeloom.auto.trials import Factors, Trials, way_of
from timeloom.auto.warmups import MOST_LONGER, Miss, WarmupSearch, rounded_down, rounded_up
from timeloom.kernels.layer import Cutting
from timeloom.report import SolveReport

ASSUMED_FORGETTING = 0.728
"""Forgetting of a network nothing is known about, a step: a freshly initialised GRU or LSTM forgets faster, as
`python -m benchmarks.calibrate` shows."""
NOISE, PART_OF_TOLERANCE = 1e-7, 1 / 64
"""Jumps this small, or this small a part of the tolerance, are rounding: they bound how fast a network forgets, but do
not tell it."""
STAYS = 0.9
"""A warm-up stays as it is where this part of it would be enough."""
NEARLY = 4
"""A first jump within this factor of the tolerance needs no longer warm-up: the few rows over it are run again."""
MOST_ROUNDING, MOST_ROUNDING_SHOWN = 1e-6, 4e-6
"""Jumps beyond this are never rounding, as one more sweep tells; and as a longer warm-up does."""
SHOWN = 1.1
"""How much longer that one is at least: over so many steps more, what is forgotten to 1e-6 shrinks to a fourth."""
ABOVE_ROUNDING = 2.0
"""Tolerance, in jumps that turned out to be rounding: more precise than that no sweep is."""
MOST_MISSES = 4
"""Quick certificates that may fail by little, each making the warm-up longer, before they are not tried any more."""
MOST_FALLBACKS = 2
"""Times in a row that sweeps may give up, after each of which more is known, before the network is left alone."""
FEW_SWEEPS = 2
"""Corrected sweeps so few that a warm-up may be cheaper again."""
LOOKS = (1, 8, 64, 512)
"""Solves by more sweeps after which it is tried whether a warm-up would be cheaper, however little the jumps behind
shorter ones promise."""
FIRST_LOOK = 8
"""Solves of so few sweeps in a row after which that is tried; twice as many after each try that failed."""
SPARE = 0.1
"""An error this much below its limit would have met it a sweep earlier."""
SPARE_SOLVES = 8
"""Solves in a row after which one of Newton's steps less is tried."""
LEAST_CONTRACTION = 0.5
"""What a warm-up is taken to shrink a difference by where it does not show: the next one then is as long as can be."""
MOST_CORRECTED = 12
"""Sweeps with corrections that are tried at once, at most."""
NEVER = 10**9
"""So many steps or sweeps that no plan has them."""
LOOK_AFTER = 64
"""Solves in a row after which something cheaper that was not enough once is tried again: a warm-up in place of dense
transfers, fewer sweeps."""
MUCH_SHORTER = 16
"""A warm-up from known states that is shorter by this factor than one from elsewhere is taken for too short."""
LONGEST_PAUSE = 256
"""Calls after which `auto` looks again at a network that did not contract, at most."""

Shown = tuple[int, int | None, bool, bool, float, Factors]
"""What an experience comes to for a plan: steps of warm-up, sweeps, whether the network is unknown, whether transfers
may be dense, the jumps that are rounding, and what was measured of each way to run it."""
Basis = tuple[Any, ...]


@dataclass
class Experience:
    """What the calls on one layer and direction have shown so far; never part of a state_dict."""

    forgetting: float | None = None
    """Factor by which one step shrinks a difference between two states, as an upper bound."""
    correcting: bool = False
    """Whether the last plan was for several sweeps at once."""
    sweeps: int | None = None
    """Sweeps with corrections by the decay that were enough, where they were tried."""
    too_few: int = 0
    """Sweeps with corrections that were not enough when they were tried last."""
    since_too_few: int = 0
    """Solves since then."""
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
    missed: tuple[int, float] | None = None
    """Steps of the last warm-up that was not enough, and the jump it left, while a call tries longer ones."""
    dense_plans: int = 0
    """Plans for dense transfers in a row."""
    without_dense: int = 0
    """Plans for which there are to be none, since they failed."""
    planned: int = 0
    """Steps of the last warm-up that was planned."""
    search: WarmupSearch = field(default_factory=WarmupSearch)
    """For the shortest warm-up, where one has failed."""
    many_sweeps: int = 0
    """Solves by several sweeps since a warm-up was enough."""
    looking: bool = False
    """Whether the next plan is to try the longest warm-up that would gain over these sweeps."""
    newton_steps: int | None = None
    """Newton's steps that a solve by fused kernels takes."""
    newton_spare: int = 0
    """Solves in a row that would have done with one less."""
    rounding: float = 0.0
    """The largest jump that sweeps could not make smaller, since it was rounding."""
    trials: Trials = field(default_factory=Trials, repr=False)
    """Device times of the ways to run it; they differ between ranks."""
    extra_cycles: int = 0
    """Cycles that multigrid was given beyond the number asked for, since its gradients were too far off."""

    @property
    def resting(self) -> bool:
        """Whether shooting is not to be tried just now."""
        return self.pause > 0

    def rest_once(self) -> None:
        """Shooting is not to be tried in this call."""
        self.pause = max(self.pause, 1)

    def skip_call(self) -> None:
        """One call less to rest for."""
        self.pause = max(self.pause - 1, 0)

    def note_plan(self, sweeps: int, dense: bool = False) -> None:
        """A plan was made for so many sweeps at once, or for dense transfers."""
        self.correcting = sweeps > 1 and not dense
        self.dense_plans = self.dense_plans + 1 if dense else 0
        self.without_dense = max(self.without_dense - 1, 0)

    @property
    def allows_dense(self) -> bool:
        """Whether dense transfers may be planned: not where they have just failed, and now and then a warm-up shows
        whether the network forgets faster by now.
        """
        return not self.without_dense and self.dense_plans < LOOK_AFTER

    def worth_looking(self, longest: int) -> int:
        """Steps of the longest warm-up that would gain, where it is worth a try; 0 where it has just failed."""
        known = self.many_sweeps == LOOKS[0] and (longest <= self.search.too_short or self.search.enough > 0)
        return 0 if known else rounded_down(longest, 0)

    def shown(self, tolerance: float, linear: bool) -> Shown:
        """All that plans are made from; `linear`: of those for gradients."""
        dense = linear and self.allows_dense
        factors = self.trials.factors
        return self.warmup(tolerance), self.sweeps, self.forgetting is None, dense, self.rounding, factors

    @property
    def basis(self) -> Basis:
        """What `shown` is made from."""
        search, allows_dense = self.search, not self.without_dense and self.dense_plans < LOOK_AFTER
        searched = search.enough, search.too_short, search.missed, search.wait > 0
        return (self.forgetting, self.missed, self.misses, self.planned, self.sweeps, allows_dense, self.rounding,
                *searched, self.trials.factors)  # fmt: skip

    def wants_time(self, plan: Cutting, expected: float) -> bool:
        """Whether a pass by this plan, of so many microseconds by the costs, is to be timed."""
        cut = plan.chunk, plan.warmup, plan.sweeps
        return expected > 0 and self.trials.want(way_of(plan.sweeps, plan.dense), cut)

    def note_time(self, plan: Cutting, expected: float, milliseconds: float) -> None:
        """A pass by this plan took so long on the device."""
        cut, factor = (plan.chunk, plan.warmup, plan.sweeps), 1e3 * milliseconds / expected
        self.trials.note(way_of(plan.sweeps, plan.dense), cut, factor)

    def note_newton(self, steps: int) -> None:
        """So many of Newton's steps were enough. One less than were made is little to gain, and a step too few costs a
        whole solve: that is tried after some solves in a row that would have done with it.
        """
        self.newton_spare = self.newton_spare + 1 if steps + 1 == self.newton_steps else 0
        if self.newton_spare in (0, SPARE_SOLVES):
            self.newton_steps, self.newton_spare = steps, 0

    def note_certificate(self, met: bool) -> None:
        """The quick certificate of the planned sweeps was met, or was not and a general solve follows."""
        self.uncertified = not met

    def note_look(self, steps: int, jump: float) -> None:
        """Two states were so far apart after so many steps, without a sweep."""
        self.forgetting = min(max(jump, NOISE), 1.0) ** (1 / steps)

    def note_miss(self, plan: Cutting, error: float) -> None:
        """The planned sweeps were not certified, by this jump or error. From two warm-ups of different lengths follows
        how fast the jump shrinks once what is quickly forgotten is gone, and so how long the next one must be.
        """
        if plan.dense:
            self.without_dense = LONGEST_PAUSE
            return
        if plan.sweeps > 1:
            self.too_few, self.since_too_few = plan.sweeps, 0
            more = plan.sweeps + max(FEW_SWEEPS, plan.sweeps // 2)
            self.sweeps = more if more <= MOST_CORRECTED else NEVER
            return
        last, self.missed = self.missed, (plan.warmup, error)
        self.looking = False
        before = (Miss(0, 1.0), Miss(0, 1.0), *self.search.missed)[-2]
        shorter = Miss(0, 1.0) if last is None else Miss(*last)  # of this call: another one's weights and inputs differ
        if SHOWN * shorter.steps <= plan.warmup and _are_rounding(shorter.jump, error):
            self.rounding, self.missed = max(self.rounding, shorter.jump, error), None
            short = before.steps if before.steps < shorter.steps else 0
            self.search = WarmupSearch(shorter.steps, max(short, int(shorter.steps / MOST_LONGER), 1))
            return
        self.search.note_too_short(plan.warmup, error)
        if plan.warmup == 0 or not 0 < error < math.inf:
            self.forgetting = 1.0
            return
        steps, jump = plan.warmup, min(error, 1.0)
        if last is not None and last[0] < steps and jump < min(last[1], 1.0):
            self.forgetting = (jump / min(last[1], 1.0)) ** (1 / (steps - last[0]))
        else:
            self.forgetting = min(jump ** (1 / steps), LEAST_CONTRACTION ** (1 / steps))

    def look_below(self) -> None:
        """Less may be enough from known states than what was: look at once, from what was enough downwards."""
        self.pause = self.too_few = self.since_too_few = 0
        self.missed = None
        if self.search.enough:
            self.search = WarmupSearch(self.search.enough, max(self.search.enough // MUCH_SHORTER, 1))

    def add_cycle(self) -> None:
        """Multigrid's gradients were too far off: a cycle more from now on."""
        self.extra_cycles += 1

    def due(self, every: int | None) -> bool:
        """Whether this solve's gradient is one of those to compare with the exact one."""
        self.solves += 1
        return every is not None and self.solves % every == 0

    def warmup(self, tolerance: float) -> int:
        """Steps after which this network has forgotten where it started, to within the tolerance."""
        forgetting = ASSUMED_FORGETTING if self.forgetting is None else self.forgetting
        if forgetting >= 1 - 1e-6:
            return NEVER
        if self.missed is not None:  # the steps of the last warm-up, and as many more as its jump needs
            tried, jump = self.missed
            if self.search.enough > tried:
                return self.search.enough
            more = math.log(tolerance / 4 / min(jump, 1.0)) / math.log(forgetting)
            return self._stepped(math.ceil(self.search.longer(tried, more, jump)))
        found = self.search.next(tolerance)
        if found is not None:
            return found
        steps = max(4, math.ceil(math.log(tolerance / 4) / math.log(forgetting)))
        return self._stepped(steps + self.misses * math.ceil(steps / 8))

    def _stepped(self, steps: int) -> int:
        """The last warm-up where that is about as long, else one that grows in steps."""
        if not STAYS * self.planned <= steps <= self.planned:
            self.planned = rounded_up(steps)
        return self.planned

    def attainable(self, tolerance: float) -> float:
        """The tolerance, or what rounding has turned out to allow."""
        return max(tolerance, ABOVE_ROUNDING * self.rounding)

    @property
    def trusted(self) -> bool:
        """Whether one sweep is likely to be certified at once."""
        return not self.corrected and self.misses <= MOST_MISSES

    def learn(self, report: SolveReport) -> None:
        """Take in what a shooting solve showed, if it can be seen yet."""
        if report.certificate is not None:
            return
        looked, self.looking = self.looking, False
        self._learn_tries(report)
        self._learn_rounding(report)
        self.corrected = report.iterations > 1 or report.fell_back or bool(report.levels)
        self.fallbacks = self.fallbacks + 1 if report.fell_back else 0
        self.misses += self.uncertified and not self.corrected
        self.uncertified = False
        if self.correcting and report.residuals and not report.warmup:  # else it is of an earlier plan
            self._learn_sweeps(report)
        if report.warmup and report.residuals:
            first = report.residuals[0]
            noise = min(NOISE, PART_OF_TOLERANCE * report.tolerance)
            seen = min(max(first, noise), 1.0) ** (1 / report.warmup)
            halved = len(report.residuals) > 1 and report.residuals[1] < 0.5 * first
            # What is left, and what no sweep makes less, is rounding: a longer warm-up would not help.
            near = first <= NEARLY * report.tolerance and not halved
            self.forgetting = min(seen, self.forgetting or 1.0) if near else seen
            if not self.corrected:  # sweeps that had to be corrected may converge and yet not pay
                self.search.note_enough(report.warmup)
                self.many_sweeps = self.many_sweeps if looked else 0  # it was enough, but may not be cheaper
                self.look_after = FIRST_LOOK
                self.setbacks = 0 if report.converged else self.setbacks
            if self.misses > MOST_MISSES and first <= report.tolerance / 4:
                self.misses = 0
        if self.fallbacks >= MOST_FALLBACKS:
            self.rest()

    def _learn_rounding(self, report: SolveReport) -> None:
        """Take in that a sweep has not halved jumps that were hardly over the tolerance."""
        if report.fell_back or len(report.residuals) < 2:
            return
        before, after = report.residuals[-2:]
        if 0.5 * before < after and before <= min(NEARLY * report.tolerance, MOST_ROUNDING):
            self.rounding = max(self.rounding, before)

    def _learn_tries(self, report: SolveReport) -> None:
        """Take in how a call ended whose first warm-up was not enough: leave the network alone where none was."""
        if self.missed is None:
            return
        self.missed, self.uncertified = None, False
        if report.solver == "sequential" and not self.resting:
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
        self.since_too_few += 1
        if self.since_too_few > LOOK_AFTER:
            self.too_few = 0
        self.sweeps = max(report.iterations - spare, self.too_few + 1, FEW_SWEEPS)
        self.many_sweeps += 1
        self.looking = self.many_sweeps in LOOKS and self.sweeps > FEW_SWEEPS
        self.calm = self.calm + 1 if self.sweeps <= FEW_SWEEPS else 0
        if self.calm >= self.look_after:
            self.sweeps = self.forgetting = None
            self.search = WarmupSearch()
            self.calm, self.look_after = 0, min(2 * self.look_after, LONGEST_PAUSE)

    def rest(self) -> None:
        """Shooting does not pay on this network as it is: leave it alone for a while, then look at it afresh."""
        self.setbacks += 1
        self.fallbacks = 0
        self.pause = min(4 * 2**self.setbacks, LONGEST_PAUSE)
        self.forgetting = self.sweeps = None
        self.search = WarmupSearch()


def _are_rounding(before: float, after: float) -> bool:
    """Whether jumps are rounding, one behind a warm-up and one behind a longer one."""
    return 0.5 * before < after <= MOST_ROUNDING_SHOWN and before <= MOST_ROUNDING_SHOWN


@lru_cache(maxsize=64)
def assumed_warmup(tolerance: float) -> int:
    """Steps after which a network nothing is known about has forgotten where it started."""
    return Experience().warmup(tolerance)


@dataclass
class LayerExperience:
    """The experience with one layer and direction, forward and backward."""

    forward: Experience = field(default_factory=Experience)
    backward: Experience = field(default_factory=Experience)
    warm: Experience | None = None
    """Forward, of solves that begin at known states: they need shorter warm-ups and fewer sweeps."""

    def beginning(self, known: bool) -> Experience:
        """The experience with forward solves that begin at known states, first of all what is known of the others; or
        with those that do not.
        """
        if known and self.warm is None:
            self.warm = deepcopy(self.forward)
            self.warm.look_below()
        return self.warm if known and self.warm is not None else self.forward

    def learn_backward(self, report: SolveReport) -> None:
        """Take in what a backward solve showed; a gradient that was too far off costs both passes a cycle more."""
        self.backward.learn(report)
        if report.gradient is not None and report.gradient.too_far:
            self.forward.add_cycle()
            self.backward.add_cycle()
