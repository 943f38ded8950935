"""What earlier calls have shown about one pass of a layer: how fast it forgets, and whether sweeps were enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from timeloom.auto.rounding import NEARLY, Rounding
from timeloom.auto.sweep_counts import LOOK_AFTER, LOOKS, SweepCounts
from timeloom.auto.trials import Factors, Trials
from timeloom.auto.warmups import MOST_LONGER, Miss, WarmupSearch, rounded_down, rounded_up
from timeloom.kernels.layer import Cutting
from timeloom.report import SolveReport

ASSUMED_FORGETTING = 0.728
"""Assumed forgetting per step of an unknown network: a freshly initialised GRU or LSTM forgets faster, as
`python -m benchmarks.calibrate` shows."""
NOISE, PART_OF_TOLERANCE = 1e-7, 1 / 64
"""Size of a jump, also as a share of the tolerance, up to which it is rounding: such jumps only give an upper bound of
the forgetting."""
STAYS = 0.9
"""A warm-up is kept if at least this share of it is needed."""
MOST_MISSES = 4
"""Narrow misses of quick certificates, each of which lengthens the warm-up, after which these are no longer tried."""
MOST_FALLBACKS = 2
"""Times in a row that sweeps may give up, learning each time, before shooting is suspended for this network."""
NEVER = 10**9
"""More steps than any warm-up has."""
LEAST_CONTRACTION = 0.5
"""Factor by which a warm-up is assumed to shrink a difference if it did not: the next one is as long as possible."""
MUCH_SHORTER = 16
"""Factor by which a warm-up from known states can be shorter than a usual one; shorter ones are assumed too short."""
FIRST_PAUSE, LONGEST_PAUSE = 20, 256
"""Number of calls, at first and at most, after which `auto` looks again at a network that did not contract: a look that
fails may cost as much as a call, and one call in 20 may be lost."""

Shown = tuple[int, bool, int, tuple[int | None, ...], bool, bool, float, Factors]
"""What plans are made from: steps of the warm-up, whether one was too short, the stretch of the chunks of several
sweeps and the number of sweeps over these and others, whether the network is unknown, whether dense transfers are
allowed, the largest jump that is rounding, and the time factor of each way."""
Basis = tuple[Any, ...]


@dataclass
class Experience:
    """What earlier calls of one layer and direction have shown about one pass; never part of a state_dict.

    Changed only by its own methods, from the reports of solves.
    """

    forgetting: float | None = None
    """Upper bound of the factor by which one step shrinks a difference between two states; None if unknown."""
    correcting: bool = False
    """Whether the last plan was for several sweeps in one call."""
    pause: int = 0
    """Number of calls for which shooting is suspended."""
    corrected: bool = False
    """Whether the last solve needed more than its warm-up and one sweep."""
    uncertified: bool = False
    """Whether the quick certificate of one sweep has just failed, so that the driver continues the solve."""
    misses: int = 0
    """Number of times that it failed so narrowly that the driver found nothing to correct."""
    fallbacks: int = 0
    """Number of times in a row that sweeps gave up."""
    setbacks: int = 0
    """Number of times in a row that shooting turned out not to pay."""
    solves: int = 0
    """Number of solves that asked whether their gradient is due for a comparison."""
    missed: tuple[int, float] | None = None
    """Steps of the last warm-up that was too short, and the jump that it left, while longer ones are being tried."""
    missed_before: bool = False
    """Whether that was in an earlier call, with other weights and inputs."""
    dense_plans: int = 0
    """Number of plans for dense transfers in a row."""
    without_dense: int = 0
    """Number of plans for which dense transfers are still ruled out, since they failed."""
    planned: int = 0
    """Steps of the warm-up that was planned last."""
    search: WarmupSearch = field(default_factory=WarmupSearch)
    """The search for the shortest warm-up, once one has failed."""
    counts: SweepCounts = field(default_factory=SweepCounts)
    """Numbers of sweeps and of Newton steps that were needed, if several were made."""
    rounding: Rounding = field(default_factory=Rounding)
    """Jumps that cannot be made smaller."""
    trials: Trials = field(default_factory=Trials, repr=False)
    """Device times of the ways to run this pass; they differ between ranks."""
    extra_cycles: int = 0
    """Additional multigrid cycles, since gradients were too far off with the number asked for."""

    @property
    def looking(self) -> bool:
        """Whether the next plan should try the longest warm-up that would be faster than these sweeps."""
        return self.counts.looking

    @property
    def resting(self) -> bool:
        """Whether shooting is suspended."""
        return self.pause > 0

    def rest_once(self) -> None:
        """Suspend shooting for this call."""
        self.pause = max(self.pause, 1)

    def skip_call(self) -> None:
        """Count a call down for which shooting is suspended."""
        self.pause = max(self.pause - 1, 0)

    def note_plan(self, sweeps: int, dense: bool = False, stretch: int = 1) -> None:
        """Note that a plan was made for this number of sweeps, over chunks longer by `stretch`, or dense transfers."""
        self.correcting = sweeps > 1 and not dense
        if self.correcting:
            self.counts.note_stretch(stretch, sweeps)
        self.dense_plans = self.dense_plans + 1 if dense else 0
        self.without_dense = max(self.without_dense - 1, 0)

    @property
    def allows_dense(self) -> bool:
        """Whether dense transfers may be planned.

        Not if they have just failed, nor once in a while, when a warm-up shows whether the network forgets faster by
        now.
        """
        return not self.without_dense and self.dense_plans < LOOK_AFTER

    def worth_looking(self, longest: int) -> int:
        """Steps of the warm-up to try, given the longest one that would gain; 0 if that has just failed."""
        known = self.counts.solves == LOOKS[0] and (longest <= self.search.too_short or self.search.enough > 0)
        return 0 if known else rounded_down(longest, 0)

    def shown(self, tolerance: float, linear: bool) -> Shown:
        """Everything that plans are made from; `linear`: for plans of gradients."""
        dense, counts, factors = linear and self.allows_dense, self.counts, self.trials.factors
        warmup, sweeps = (self.warmup(tolerance), self.search.too_short > 0), (counts.stretch, counts.alternatives)
        return *warmup, *sweeps, self.forgetting is None, dense, self.rounding.largest, factors

    @property
    def basis(self) -> Basis:
        """Everything that `shown` is derived from."""
        search, counts, rounding = self.search, self.counts, self.rounding.largest
        searched = search.enough, search.too_short, search.missed, search.wait > 0
        return (self.forgetting, self.missed, self.misses, self.planned, counts.stretch, counts.alternatives,
                self.allows_dense, rounding, *searched, self.trials.factors)  # fmt: skip

    def note_certificate(self, met: bool) -> None:
        """Note whether the quick certificate of the planned sweeps was met; if not, the driver continues the solve."""
        self.uncertified = not met

    def note_look(self, steps: int, jump: float) -> None:
        """Note that two states were this far apart after `steps` steps, as measured without a sweep."""
        self.forgetting = min(max(jump, NOISE), 1.0) ** (1 / steps)

    def note_miss(self, plan: Cutting, error: float, over: bool = False) -> None:
        """Note that the planned sweeps missed their certificate by this jump or error.

        Two warm-ups of different lengths show how fast the jump shrinks once everything that is quickly forgotten is
        gone, and so how long the next warm-up must be.

        over: whether the call that missed is over, so that the next plan is for another call.
        """
        if plan.dense:
            self.without_dense = LONGEST_PAUSE
            return
        if plan.sweeps > 1:
            self.counts.note_too_few(plan.sweeps, error, plan.limit)
            return
        last, self.missed = None if self.missed_before else self.missed, (plan.warmup, error)
        self.missed_before = over
        self.counts.stop_looking()
        before = (Miss(0, 1.0), Miss(0, 1.0), *self.search.missed)[-2]
        shorter = Miss(0, 1.0) if last is None else Miss(*last)  # of this call: others have other weights and inputs
        if self.rounding.learn_warmups(shorter, (plan.warmup, error)):
            self.missed = None
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
        """Search at once for shorter warm-ups than the one that was enough: calls now begin at known states."""
        self.pause, self.missed = 0, None
        self.counts.look_below()
        if self.search.enough:
            self.search = WarmupSearch(self.search.enough, max(self.search.enough // MUCH_SHORTER, 1))

    def add_cycle(self) -> None:
        """Make one more multigrid cycle from now on, since gradients were too far off."""
        self.extra_cycles += 1

    def due(self, every: int | None) -> bool:
        """Whether this solve's gradient is due for a comparison with the exact one; counts the solve."""
        self.solves += 1
        return every is not None and self.solves % every == 0

    def warmup(self, tolerance: float) -> int:
        """The steps of warm-up after which this network has forgotten its initial state, to within the tolerance."""
        forgetting = ASSUMED_FORGETTING if self.forgetting is None else self.forgetting
        if forgetting >= 1 - 1e-6:
            return NEVER
        if self.missed is not None:  # the last warm-up, plus the steps that its jump needs
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
        """The last planned warm-up if it is about as long, else `steps` rounded up."""
        if not STAYS * self.planned <= steps <= self.planned:
            self.planned = rounded_up(steps)
        return self.planned

    @property
    def trusted(self) -> bool:
        """Whether one sweep is likely to be certified at once."""
        return not self.corrected and self.misses <= MOST_MISSES

    def learn(self, report: SolveReport) -> None:
        """Learn from the report of a shooting solve, unless its certificate is not known yet."""
        if report.certificate is not None:
            return
        looked = self.counts.stop_looking()
        self._learn_tries(report)
        self.rounding.learn(report)
        self.corrected = report.iterations > 1 or report.fell_back or bool(report.levels)
        self.fallbacks = self.fallbacks + 1 if report.fell_back else 0
        self.misses += self.uncertified and not self.corrected
        self.uncertified = False
        if self.correcting and report.residuals and not report.warmup:  # else the report is of an earlier plan
            self._learn_sweeps(report)
        if report.warmup and report.residuals:
            first = report.residuals[0]
            noise = min(NOISE, PART_OF_TOLERANCE * report.tolerance)
            seen = min(max(first, noise), 1.0) ** (1 / report.warmup)
            halved = len(report.residuals) > 1 and report.residuals[1] < 0.5 * first
            # A jump that no sweep reduces is rounding: a longer warm-up would not help.
            near = first <= NEARLY * report.tolerance and not halved
            self.forgetting = min(seen, self.forgetting or 1.0) if near else seen
            if not self.corrected:  # corrected sweeps may converge and yet not pay
                self.search.note_enough(report.warmup)
                self.counts.note_warmup(looked)
                self.setbacks = 0 if report.converged else self.setbacks
            if self.misses > MOST_MISSES and first <= report.tolerance / 4:
                self.misses = 0
        if self.fallbacks >= MOST_FALLBACKS:
            self.rest()

    def _learn_tries(self, report: SolveReport) -> None:
        """Learn how a call ended whose first warm-up was too short: suspend shooting if none was long enough."""
        if self.missed is None:
            return
        self.missed, self.uncertified = None, False
        if report.solver == "sequential" and not self.resting:
            self.rest()

    def _learn_sweeps(self, report: SolveReport) -> None:
        """Learn how many sweeps were needed, or that they were not enough."""
        if report.fell_back or not report.converged:
            self.rest()
            return
        self.setbacks = 0
        if self.counts.learn(report):
            self.forgetting, self.search = None, WarmupSearch()

    def rest(self) -> None:
        """Suspend shooting for a while, since it does not pay on this network as it is, and then learn it anew."""
        self.setbacks += 1
        self.fallbacks = 0
        self.pause = min(FIRST_PAUSE * 2 ** (self.setbacks - 1), LONGEST_PAUSE)
        self.forgetting, self.search = None, WarmupSearch()
        self.counts.forget()


@lru_cache(maxsize=64)
def assumed_warmup(tolerance: float) -> int:
    """Steps after which an unknown network is assumed to have forgotten its initial state."""
    return Experience().warmup(tolerance)
